"""A docstring whose example shows another result than the code gives is caught here alone."""

import doctest
import importlib
import linecache
import os
import sys
from types import ModuleType

import pytest

from tests.packaging.conftest import ROOT

FILES = [path for path in sorted(ROOT.glob("trainkit/**/*.py")) if path.name != "__main__.py"]
SHOWING = {path for path in FILES if ">>>" in path.read_text()}


def imported(name: str) -> ModuleType | None:
    """Import a module; None if it needs a package that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("trainkit", "benchmarks")):
            raise
        return None


def named(*parts: str) -> str:
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


@pytest.mark.parametrize("name", [named(*path.relative_to(ROOT).parts) for path in sorted(SHOWING)])
def test_the_examples_of_a_docstring_run(name: str) -> None:
    module = imported(name)
    if module is None:
        pytest.skip("needs a package that is not installed")
    linecache.clearcache()  # doctest looks at the file of each cached line before each docstring
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(module, optionflags=flags).failed == 0


def test_all_other_modules_and_benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # benchmarks set the number of threads there
    monkeypatch.setattr(sys, "path", [*sys.path])
    for path in (*FILES, *ROOT.glob("benchmarks/**/[a-z]*.py")):
        if path not in SHOWING:
            imported(named(*path.relative_to(ROOT).parts))
