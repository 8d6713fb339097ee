"""The processes that another process has started."""

from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Return the names of a process's children, their children and so on, by process id (Linux).

    A process, or a thread of it, that ends while it is read is left out.
    """
    children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _read(path).split()]
    named = {child: _read(Path(f"/proc/{child}/comm")).strip() for child in children}
    return named | {grandchild: name for child in children for grandchild, name in descendants(child).items()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process or the thread has ended
        return ""
