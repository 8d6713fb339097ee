from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import trainkit.data
import trainkit.models
import trainkit.objectives

MODULES = [
    info.name
    for package in (trainkit.data, trainkit.models, trainkit.objectives)
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
