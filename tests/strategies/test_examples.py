"""The examples in docstrings of the strategies, run."""

import doctest
import importlib

import pytest

MODULES = [
    "device_map",
    "devices",
    "fsdp",
    "layouts",
    "maps.balance",
    "maps.fitting",
    "maps.syntax",
    "maps.units",
    "packing",
    "parameter_server.greeting",
    "parameter_server.links",
    "parameter_server.norms",
    "parameter_server.policies",
    "parameter_server.record",
    "parameter_server.shares",
    "parameter_server.staging",
    "parameter_server.strategy",
    "parameter_server.tables",
    "parameter_server.variables",
    "parameter_server.wire",
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
