"""Compiled graphs of one test are not taken by another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """Forget the graphs and counters of torch.compile before a test, and its graphs after it."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
