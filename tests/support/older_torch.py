"""Skips of tests that need a newer torch than the lowest that pyproject.toml allows."""

from __future__ import annotations

import pytest


@pytest.fixture
def compiled_gradients() -> None:
    """Skip the test if this torch compiles no gradients."""
    from trainkit.strategies.core.graphs.refusals import compiles_gradients

    if not compiles_gradients():
        pytest.skip("needs torch 2.11, which compiles torch.autograd.grad")
