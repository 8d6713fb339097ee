"""A new module that reads a file of a run, or a message of another process, without bounds is caught here alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

LIBRARY: Final = Path(__file__).resolve().parents[2] / "trainkit"
READS: Final = {"read_text", "read_bytes", "fromfile", "memmap", "safe_open", "load_file", "unpack_archive"}
"""Methods and functions that read, whatever they belong to."""
OPENS: Final = {"open", "fdopen"}
PARSES: Final = {
    ("json", "load"), ("json", "loads"), ("yaml", "load"), ("yaml", "safe_load"), ("OmegaConf", "load"),
    ("torch", "load"), ("np", "load"), ("numpy", "load"), ("pickle", "load"), ("pickle", "loads"), ("csv", "reader"),
}  # fmt: skip
ALLOWED: Final[dict[str, tuple[tuple[str, set[str]], ...]]] = {
    "the modules themselves": (
        ("files.py", {"open", "fdopen", "read_bytes", "yaml.load"}),
    ),
    "a part of the package": (
        ("report/error_address.py", {"read_text"}), ("report/web/page.py", {"read_text"}),
        ("extras.py", {"read_text"}), ("verbs/starting/init.py", {"read_text"}),
        ("config/targets/choices.py", {"read_text"}),
    ),
    "/proc, the cgroup file system, and a memory segment of this run": (
        ("run/estimates/this_machine.py", {"read_text", "json.loads"}),
        ("run/agent/failure.py", {"read_text"}), ("strategies/reducers/shared_memory.py", {"read_text", "open"}),
        ("trainer/metrics_accumulator.py", {"read_text"}),
        ("cluster/host.py", {"read_text", "read_bytes"}),
    ),
    "a config or a variable of the user, and what was read within the bounds": (
        ("config/yaml_files.py", {"yaml.safe_load", "open", "read_text"}),
    ),
    "what its own child or parent writes, or it itself has just written": (
        ("run/process/fork_server.py", {"json.loads"}),
        ("trained/checking.py", {"load_file"}),
        ("trained/fresh_process.py", {"read_text", "json.loads", "load_file"}), ("trained/formats.py", {"safe_open"}),
        ("trainer/manifest.py", {"json.loads", "open"}),
    ),
    "the null device, a service, a URL of the user whose answer is not read, and a file that it checks itself": (
        ("cli.py", {"open"}), ("tracking/sending.py", {"open"}), ("callbacks/alert.py", {"open"}),
        ("report/train_log.py", {"open"}), ("run/process/worker_group.py", {"read_text", "open"}),
        ("strategies/updates/scheduler.py", {"open"}), ("run/signals.py", {"open", "fdopen"}),
    ),
    "a new file that it writes, and a folder that it locks or makes durable": (
        ("trainer/checkpoint/saving.py", {"open"}), ("report/events.py", {"open"}),
        ("trainer/checkpoint/tensors.py", {"open"}), ("run/record.py", {"open"}),
        ("run/folder/run_folder.py", {"open"}),
    ),
    "the data that the user names, or a file of a size or hash that is known": (
        ("data/sets/images.py", {"open", "np.load", "fromfile", "read_bytes"}),
        ("data/reading/files.py", {"open", "read_bytes"}),
        ("data/sets/text.py", {"memmap", "read_bytes"}),
        ("data/sets/json_lines.py", {"open"}), ("data/sets/tables.py", {"csv.reader"}),
    ),
}  # fmt: skip
"""Why it is not a file of a run and no message of another process -> the files, and what each calls."""


def calls(tree: ast.AST, imported: set[str]) -> Iterator[tuple[str, int]]:
    """Calls that read or parse, with their lines; of the functions that a file imports from us, none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in (OPENS | READS) - imported:
                yield function.id, node.lineno
        elif isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            if (owner, function.attr) in PARSES:
                yield f"{owner}.{function.attr}", node.lineno
            elif function.attr in OPENS | READS and not _opens_no_file(function.attr, node):
                yield function.attr, node.lineno


def _opens_no_file(name: str, call: ast.Call) -> bool:
    """A store, a board and an office open as well: without a mode, and not by a path or `os`."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    names = "store board self._rendezvous hosted self.store self._meeting CoordinatorState"
    return name == "open" and owner in names.split()


def calls_in(file: Path) -> dict[str, list[int]]:
    """Name of a call -> its lines; of the functions that the bounded modules offer, none."""
    source = file.read_text(encoding="utf-8")
    if not any(call in source for call in (*READS, *OPENS, *(name for _, name in PARSES))):
        return {}
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "trainkit.files"
        for alias in node.names
    }
    by_name: dict[str, list[int]] = {}
    for name, line in calls(tree, imported):
        by_name.setdefault(name, []).append(line)
    return by_name


@pytest.mark.slow
def test_every_file_of_a_run_is_read_through_the_bounded_modules() -> None:
    past: dict[str, str] = {}
    stale: list[str] = []
    allowed = {file: names for files in ALLOWED.values() for file, names in files}
    for path in sorted(LIBRARY.rglob("*.py")):
        file, by_name = path.relative_to(LIBRARY).as_posix(), calls_in(path)
        names = allowed.get(file, set())
        past |= {f"{file}:{lines[0]}": name for name, lines in by_name.items() if name not in names}
        stale += [f"{file}: {name}" for name in names - by_name.keys()]
    assert not past, "read it through trainkit.files, or say in ALLOWED why not"
    assert not stale, "nothing there reads so any more: take it out of ALLOWED"


def test_the_scan_sees_each_kind_of_read(tmp_path: Path) -> None:
    reads = ("json.loads(x)", "open(x)", "path.open()", "Path(x).read_text()", "yaml.safe_load(x)", "os.open(x, 0)")
    for source in reads:
        (tmp_path / "new.py").write_text(source)
        assert calls_in(tmp_path / "new.py"), source
