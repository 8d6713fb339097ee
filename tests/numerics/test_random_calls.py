"""A model that draws by a function of a module of its own, unseen before the run, is caught here alone."""

from __future__ import annotations

import random
from random import gauss as bell

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.models.convnet import ConvNet
from trainkit.numerics.generators import HostStates, Untouched
from trainkit.numerics.random_calls import random_call
from trainkit.objectives.classification import Classification


def noisy(inputs: Tensor) -> Tensor:
    return inputs + torch.randn_like(inputs)


def shifted(inputs: Tensor) -> Tensor:
    return inputs + random.gauss(0, 1)


class ByFunction(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return noisy(inputs)


class ByMethod(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.sample(inputs)

    def sample(self, inputs: Tensor) -> Tensor:
        return inputs.bernoulli()


class ByModule(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return shifted(inputs)


class ByName(nn.Module):
    """The name of what it calls is not that of a random function."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + bell(0, 1)


OWN = np.random.default_rng(0)


class ByGenerator(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + OWN.gumbel()


class ByClosure(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        def dropped() -> Tensor:
            return functional.dropout(inputs)

        return dropped()


class Inherits(ByMethod):
    """Its own code draws nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)


class Quiet(nn.Module):
    """It draws at its start alone, and has a dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.dropout = nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(inputs * self.weight)
        return dropped

    def generate(self) -> Tensor:
        """Draw, which no step calls."""
        return torch.rand(2)


class Drawing(Classification):
    """An objective that draws, and does not declare otherwise."""

    def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
        return torch.randperm(4)


@pytest.mark.parametrize(("model", "found"), [
    (ByFunction(), "noisy calls randn_like"), (ByMethod(), "ByMethod.sample calls bernoulli"),
    (ByModule(), "shifted calls random"), (ByName(), "ByName.forward calls random"),
    (ByGenerator(), "ByGenerator.forward calls random"), (ByClosure(), "ByClosure.forward calls dropout"),
    (Inherits(), "ByMethod.sample calls bernoulli"),
    (nn.Sequential(nn.Linear(2, 2), ByMethod()), "ByMethod.sample calls bernoulli"),
    (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), "1: Dropout"),
    (Quiet(), None), (ConvNet(widths=[2]), None),
])  # fmt: skip
def test_what_a_step_may_draw_is_named(model: nn.Module, found: str | None) -> None:
    assert random_call(model, Classification()) == found


def test_an_objective_is_read_too() -> None:
    assert random_call(nn.Linear(2, 2), Drawing()) == "Drawing.loss calls randperm"


def test_the_second_number_of_a_pair_counts_as_drawn() -> None:
    with Untouched(seed=0):
        np.random.standard_normal()  # noqa: NPY002 - NumPy keeps another one for the next call
        states = HostStates.now()
        assert not states.moved()
        np.random.standard_normal()  # noqa: NPY002
        assert states.moved()
