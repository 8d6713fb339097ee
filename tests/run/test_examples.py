import doctest
import importlib
import pkgutil

import pytest

import trainkit.run
import trainkit.run.diagnosis
import trainkit.run.equivalence

PACKAGES = [trainkit.run, trainkit.run.diagnosis, trainkit.run.equivalence]
MODULES = [
    info.name
    for package in PACKAGES
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not info.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_run(name):
    found = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert found.failed == 0
