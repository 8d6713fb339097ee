"""Mutants: silent bugs of real trainers, planted one at a time in a copy of the sources.

Each is a line of `mutants.yaml`: what the bug is, the file, the text to replace, and the tests that killed it. The
recorded killers must fail on the planted copy; a mutant that survives them is a hole in the suite.
"""

from __future__ import annotations

import builtins
import compileall
import dis
import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from types import CodeType

import yaml

from tests.support import quick

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("trainkit", "conf", "recipes", "hydra_plugins", "tests", "pyproject.toml", "README.md", "docs")
FAILED = 1
"""pytest's exit code where a test failed: the one answer that counts as a kill."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug."""

    name: str
    bug: str
    """What goes wrong, in a sentence."""
    file: str
    """The source file, from the root."""
    replace: str
    """Text that stands there exactly once."""
    by: str
    """What stands there in the mutant."""
    killers: tuple[str, ...]
    """Tests that fail on it, as pytest node ids."""

    def planted(self, source: str) -> str:
        """The file's text with the bug in it.

        Raises:
            ValueError: the text to replace is not there exactly once: the code moved on, and the mutant must too.
        """
        count = source.count(self.replace)
        if count != 1:
            msg = f"mutant {self.name}: its text stands {count} times in {self.file}"
            raise ValueError(msg)
        return source.replace(self.replace, self.by)

    def undefined(self) -> list[str]:
        """Return the global names that the planted file reads and nothing defines: a NameError is no kill."""
        code = compile(self.planted((ROOT / self.file).read_text()), self.file, "exec")
        module = importlib.import_module(self.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        return sorted(_globals_read(code) - {*vars(module), *vars(builtins)})


def _globals_read(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_read(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def mutants() -> list[Mutant]:
    """All of them, from `mutants.yaml`."""
    listed = yaml.safe_load((Path(__file__).parent / "mutants.yaml").read_text())
    return [Mutant(name=name, killers=tuple(entry.pop("killers")), **entry) for name, entry in listed.items()]


def copy_sources(to: Path) -> Path:
    """A copy of all that a test run needs."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)
    # Bytecode that is checked against the source's content, not its time: planting takes less than the clock's grain.
    compileall.compile_dir(to / "trainkit", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return to


@contextmanager
def plant(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The bug, in a copy, for the length of a block."""
    path = copy / mutant.file
    source = path.read_text()
    path.write_text(mutant.planted(source))
    try:
        yield
    finally:
        path.write_text(source)


def run_tests(copy: Path, tests: Sequence[str], *, timeout_s: float, **more: str) -> tuple[int, str]:
    """Run pytest on a copy, to the first failure; (exit code, output).

    Every process it starts imports the copy: it stands first on PYTHONPATH, before an editable install. The bytecode of
    its tests is written, by the first that imports them; that of the library is `copy_sources`'s, and Python compiles a
    file anew that is not the one whose content it holds.
    """
    environment = os.environ | {"PYTHONPATH": str(copy)} | more
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--numprocesses", "0", "-m", "not engine"]
    command = quick.command(*options, *tests, module="pytest", imports="torch")
    process = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return process.returncode, process.stdout + process.stderr
