import doctest
import importlib
import pkgutil

import pytest

import trainkit.run

MODULES = [info.name for info in pkgutil.iter_modules(trainkit.run.__path__, "trainkit.run.") if not info.ispkg]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_run(name):
    found = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert found.failed == 0
