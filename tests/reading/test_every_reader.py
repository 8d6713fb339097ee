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
ALLOWED: Final[dict[str, dict[str, str]]] = {
    "files.py": {"open": "the module itself", "fdopen": "the same", "read_bytes": "of the same"},
    "bounded.py": {"yaml.load": "the module itself, after its bounds"},
    "cli.py": {"open": "the null device"},
    "report/error_address.py": {"read_text": "trainkit's own page"},
    "report/web/page.py": {"read_text": "trainkit's own scripts and styles"},
    "extras.py": {"read_text": "trainkit's own pyproject.toml"},
    "verbs/starting/init.py": {"read_text": "trainkit's own template"},
    "run/estimates/calibrating.py": {"read_text": "a file of its own child", "json.loads": "of the same"},
    "run/estimates/this_machine.py": {"read_text": "/proc and the cgroup file system"},
    "redaction.py": {"read_text": "/proc", "read_bytes": "/proc"},
    "run/hang_detection.py": {"read_text": "/proc and the cgroup file system"},
    "strategies/reducers/shared_memory.py": {"read_text": "/proc", "open": "a memory segment of this run"},
    "sweeps/backends/job_spec.py": {"read_text": "/proc"},
    "trainer/metrics_accumulator.py": {"read_text": "/proc"},
    "config/yaml_files.py": dict.fromkeys(("yaml.safe_load", "open", "read_text"), "what was read within the bounds"),
    "config/targets/checks.py": {"read_text": "the same"},
    "config/secrets.py": {"json.loads": "a variable of the user's own environment"},
    "run/process/fork_server.py": {"json.loads": "sockets between a process and its child"},
    "trainer/checkpoint/saving.py": {"open": "a new file in a folder of this run's own"},
    "tracking/sending.py": {"open": "the null device, and a service"},
    "callbacks/alerting/channels.py": {"open": "a URL of the user's own environment, whose answer is not read"},
    "report/drawing.py": {"json.load": "the input that the parent writes"},
    "report/train_log.py": {"open": "checks for a regular file itself; the null device"},
    "report/events.py": {"open": "writes a new file"},
    "trainer/manifest.py": {"json.loads": "of json.dumps: as a reader will see it"},
    "trainer/checkpoint/tensor_file.py": {"open": "writes new files"},
    "cluster/host.py": {"read_text": "/proc"},
    "run/record.py": {"open": "writes a new file"},
    "run/process/worker_group.py": {"open": "the null device"},
    "storage.py": {"open": "writes a new file; a folder, to make its names durable"},
    "trainer/checkpoint/retention.py": {"open": "a folder, to lock it"},
    "trainer/ownership.py": {"open": "writes a new file"},
    "run/folder/run_folder.py": {"open": "writes a new file"},
    "data/sets/digits.py": {"open": "a file of the package", "np.load": "the same; without pickles"},
    "data/sets/fashion_mnist.py": {"read_bytes": "of a hash that is known"},
    "data/reading/files.py": {"open": "a file of a hash that is known", "read_bytes": "the file that data.path names"},
    "data/sets/text.py": {"read_bytes": "the library of Python"},
    "data/sets/token_memmap.py": {"memmap": "the same"},
    "data/sets/image_folder.py": {"open": "the same"},
    "inference/parts.py": {"open": "writes new files"},
    "inference/writing.py": {"open": "writes new files"},
    "exporting/checking.py": {"load_file": "what its own process has just written, in a folder of its own"},
    "exporting/fresh_process.py": dict.fromkeys(("read_text", "json.loads", "load_file", "safe_open"), "the same"),
    "data/sets/json_lines.py": {"open": "the same, in lines of a bounded length"},
    "data/sets/tables.py": {"csv.reader": "the same"},
    "data/sets/cifar10.py": {"fromfile": "the same, of a size that is known"},
}
"""File -> what it calls -> why that is not a file of a run and no message of another process."""


def calls(tree: ast.AST, ours: set[str]) -> Iterator[tuple[str, int]]:
    """Calls that read or parse, with their lines; of the functions that a file imports from us, none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in (OPENS | READS) - ours:
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
    others = "store board self._rendezvous hosted self._store self._meeting CoordinatorState"
    return name == "open" and owner in others.split()


def found_in(file: Path) -> dict[str, list[int]]:
    """Name of a call -> its lines; of the functions that the bounded modules offer, none."""
    source = file.read_text(encoding="utf-8")
    if not any(word in source for word in (*READS, *OPENS, *(name for _, name in PARSES))):
        return {}
    tree = ast.parse(source)
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "trainkit.files"
        for alias in node.names
    }
    found: dict[str, list[int]] = {}
    for name, line in calls(tree, ours):
        found.setdefault(name, []).append(line)
    return found


@pytest.mark.slow
def test_every_file_of_a_run_is_read_through_the_bounded_modules() -> None:
    past: dict[str, str] = {}
    stale: dict[str, str] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        file, found = path.relative_to(LIBRARY).as_posix(), found_in(path)
        allowed = ALLOWED.get(file, {})
        past |= {f"{file}:{lines[0]}": name for name, lines in found.items() if name not in allowed}
        stale |= {f"{file}: {name}": why for name, why in allowed.items() if name not in found}
    assert not past, "read it through trainkit.files or trainkit.bounded, or say in ALLOWED why not"
    assert not stale, "nothing there reads so any more: take it out of ALLOWED"


def test_the_scan_sees_each_kind_of_read(tmp_path: Path) -> None:
    reads = ("json.loads(x)", "open(x)", "path.open()", "Path(x).read_text()", "yaml.safe_load(x)", "os.open(x, 0)")
    for source in reads:
        (tmp_path / "new.py").write_text(source)
        assert found_in(tmp_path / "new.py"), source
