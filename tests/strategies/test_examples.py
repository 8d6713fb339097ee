"""The examples in docstrings of the strategies, run."""

import doctest
import importlib

import pytest

MODULES = [
    "device_map",
    "devices",
    "fsdp",
    "maps.balance",
    "maps.fitting",
    "maps.syntax",
    "maps.units",
    "packing",
    "pieces",
    "sharded.cuts",
    "sharded.elementwise",
    "sharded.units",
    "spread",
    "stored",
    "telling",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"trainkit.strategies.{name}"))
    assert (found.failed, found.attempted > 0) == (0, True)
