"""A backward pass in two parts computes each gradient once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.strategies.mesh.pipe.weights import SplitStage


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Stage(nn.Module):
    """Two layers, whose outputs are a number of tensors as those of a stage are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, given: Tensor) -> tuple[Tensor, ...]:
        """(samples, 3) -> the same, and what has no gradient."""
        return self.layers(given), given.detach().argmax(1)


@pytest.mark.slow
def test_gradients_of_inputs_come_first_and_each_is_computed_once() -> None:
    stage, given = Stage(), torch.randn(2, 3, requires_grad=True)
    torch.autograd.backward(stage(given)[0], torch.ones(2, 3))
    assert given.grad is not None
    expected = [given.grad, *(param.grad for param in stage.parameters())]
    given.grad, split = None, SplitStage(stage)
    stage.zero_grad()
    outputs, places = split(given)
    assert not places.requires_grad
    with Products() as first:
        torch.autograd.backward(outputs, torch.ones(2, 3))
    assert [param.grad for param in stage.parameters()] == [None] * 4
    with Products() as second:
        split.weights()()
    found = [given.grad, *(param.grad for param in stage.parameters())]
    assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
    assert (first.count, second.count) == (2, 2)


def test_of_the_first_stage_all_is_left() -> None:
    stage, given = Stage(), torch.randn(2, 3)
    split = SplitStage(stage)
    with Products() as first:
        torch.autograd.backward(split(given)[0], torch.ones(2, 3))
    assert first.count == 0
    split.weights()()
    assert all(param.grad is not None for param in stage.parameters())
