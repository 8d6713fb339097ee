"""The examples in docstrings of trainkit, run."""

import doctest
import importlib
import linecache
import pkgutil

import pytest

import trainkit

MODULES = [
    found.name for found in pkgutil.walk_packages(trainkit.__path__, "trainkit.") if "__main__" not in found.name
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_run(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("trainkit"):
            raise
        pytest.skip(f"{error.name} is not installed")
    linecache.clearcache()  # doctest looks at the file of each cached line before each docstring
    assert doctest.testmod(module, optionflags=flags).failed == 0
