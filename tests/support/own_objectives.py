"""Objectives and models as users write them, and what each must come to, in plain torch, for the samples of the zoo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.zoo import CLASSES, FEATURES, Net, fill
from trainkit.objectives.base import Access, Loss, Model, Objective, Supervised
from trainkit.objectives.distillation import FrozenModel


class TwoTerms(Supervised):
    """Cross entropy, and the squares of the scores; both are logged."""

    term_names: ClassVar[tuple[str, ...]] = ("labels", "size")

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        """Add up both, a tenth of the squares."""
        terms = {
            "labels": functional.cross_entropy(outputs, targets, reduction="sum"),
            "size": outputs.square().sum(),
        }
        return Loss.of_terms(terms, float(len(targets)), factors={"size": 0.1})


def two_terms_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The same, for the oracle."""
    outputs, targets = model(batch[0]), batch[1]
    labels = functional.cross_entropy(outputs, targets, reduction="sum")
    return labels + 0.1 * outputs.square().sum(), float(len(targets))


@dataclass
class Heads:
    """What a model of two heads returns."""

    scores: Tensor
    size: Tensor
    hidden: list[Tensor]


class TwoHeads(nn.Module):
    """Classes and a number from one body, in a tuple, a dict or a dataclass."""

    def __init__(self, *, returns: str = "dict") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh())
        self.scores, self.size = nn.Linear(7, CLASSES), nn.Linear(7, 1)
        self.returns = returns
        fill(self)

    def forward(self, inputs: Tensor) -> Any:
        """(samples, features) -> the scores and the number of each."""
        hidden = self.body(inputs)
        scores, size = self.scores(hidden), self.size(hidden).squeeze(-1)
        if self.returns == "tuple":
            return scores, size
        return Heads(scores, size, [hidden]) if self.returns == "dataclass" else {"scores": scores, "size": size}


class BothHeads(Supervised):
    """Cross entropy of the one, and squared error of the other against the number of the class."""

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Add up both."""
        scores, size = parts_of(outputs)
        labels = functional.cross_entropy(scores, targets, reduction="sum")
        return Loss(labels + functional.mse_loss(size, targets.to(size.dtype), reduction="sum"), float(len(targets)))


def parts_of(outputs: Any) -> tuple[Tensor, Tensor]:
    """Return the scores and the numbers."""
    if isinstance(outputs, tuple):
        return outputs
    return (outputs.scores, outputs.size) if isinstance(outputs, Heads) else (outputs["scores"], outputs["size"])


def both_heads_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The same, for the oracle."""
    (scores, size), targets = parts_of(model(batch[0])), batch[1]
    labels = functional.cross_entropy(scores, targets, reduction="sum")
    return labels + (size - targets).square().sum(), float(len(targets))


class GradientPenalty(Objective):
    """Cross entropy, and the squared gradient of the scores by the inputs."""

    term_names: ClassVar[tuple[str, ...]] = ("labels", "penalty")
    needs: ClassVar[frozenset[Access]] = frozenset({Access.derivatives})

    def loss(self, model: Model, batch: Any) -> Loss:
        """Differentiate the sum of the scores of all samples: each depends on its own inputs alone."""
        labels, penalty = _penalised(model, batch)
        return Loss.of_terms({"labels": labels, "penalty": penalty}, float(len(batch[1])), factors={"penalty": 0.5})


def penalty_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The same, for the oracle."""
    labels, penalty = _penalised(model, batch)
    return labels + 0.5 * penalty, float(len(batch[1]))


def _penalised(model: Model, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch[0].detach().requires_grad_(), batch[1]
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return functional.cross_entropy(outputs, targets, reduction="sum"), slope.square().sum()


class WeightPenalty(Objective):
    """Cross entropy, and the squares of the parameters for each sample."""

    needs: ClassVar[frozenset[Access]] = frozenset({Access.parameters})

    def loss(self, model: Model, batch: Any) -> Loss:
        """Read the parameters of the model."""
        assert isinstance(model, nn.Module)
        labels = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        squares = torch.stack([param.square().sum() for param in model.parameters()]).sum()
        return Loss(labels + 0.01 * len(batch[1]) * squares, float(len(batch[1])))


def weight_penalty_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The same, for the oracle."""
    labels = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    squares = sum(param.square().sum() for param in model.parameters())
    return labels + 0.01 * len(batch[1]) * squares, float(len(batch[1]))


class Taught(Objective):
    """Squared error against the scores of a frozen model."""

    def __init__(self) -> None:
        self.teacher = FrozenModel(teacher())
        self.teacher.bind(dtype=torch.float64, load=_no_run)

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run both."""
        return Loss((model(batch[0]) - self.teacher(batch[0])).square().sum(), float(len(batch[1])))


def teacher() -> nn.Module:
    """The frozen model; its dropout would draw, were it in training mode."""
    return nn.Sequential(Net(width=5), nn.Dropout(0.5))


def taught_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The same, for the oracle."""
    targets = teacher().double().eval()(batch[0]).detach()
    return (model(batch[0]) - targets).square().sum(), float(len(batch[1]))


def _no_run(folder: str, which: str) -> nn.Module:
    raise AssertionError(folder, which)
