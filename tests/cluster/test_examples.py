import doctest
import importlib
import pkgutil

import pytest

import trainkit.cluster

MODULES = [info.name for info in pkgutil.walk_packages(trainkit.cluster.__path__, "trainkit.cluster.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
