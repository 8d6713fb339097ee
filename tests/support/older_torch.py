"""Skips of tests that need a newer torch than the lowest that pyproject.toml allows."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import pytest


@pytest.fixture
def compiled_gradients() -> None:
    """Skip the test if this torch compiles no gradients."""
    from trainkit.strategies.core.graphs.shards import compiles_gradients

    if not compiles_gradients():
        pytest.skip("needs torch 2.11, which compiles torch.autograd.grad")


def without_pipelines(items: Iterable[pytest.Item]) -> None:
    """Skip what has `pipeline` in its name if this torch is too old for `strategy=pipeline`."""
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 11):
        return
    for item in items:
        if "pipeline" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs torch 2.11"))
