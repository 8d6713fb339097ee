"""What draws or couples samples is found by running, whatever its layers are called."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.models.mlp import Mlp
from trainkit.objectives.base import Loss, Model, Objective, split_batch
from trainkit.objectives.classification import Classification
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.run.planning.coupling import Coupling, probe

DRAWS, COUPLES = "draws random numbers", "couples the samples of a shard"


def samples(count: int = 8) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=generator), place % 3) for place in range(count)]


def mlp(**settings: object) -> Mlp:
    return Mlp(in_features=6, hidden=[8], out_features=3, **settings)  # type: ignore[arg-type]


class Changed(nn.Module):
    """An MLP whose outputs go through a function."""

    mean: Tensor

    def __init__(self, change: Callable[[Changed, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = mlp(), change
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.change(self, self.inner(inputs))


def keeping(statistic: Callable[[Tensor], Tensor]) -> Callable[[Changed, Tensor], Tensor]:
    def change(model: Changed, outputs: Tensor) -> Tensor:
        model.mean.mul_(0.9).add_(0.1 * statistic(outputs.detach()))
        return outputs

    return change


def counting(model: Changed, outputs: Tensor) -> Tensor:
    model.calls += 1
    return outputs * model.calls


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (mlp(), ""),
        (mlp(dropout=0.2), f"the model {DRAWS}"),
        (mlp(batch_norm=True), f"the model {COUPLES}"),
        (mlp(batch_norm=True, dropout=0.2), f"the model {DRAWS} and {COUPLES}"),
        (mlp(batch_norm=True).eval(), ""),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))), ""),
        (Changed(lambda _, y: y - y.mean(0)), f"the model {COUPLES}"),
        (Changed(lambda _, y: y - y[0]), f"the model {COUPLES}"),
        (Changed(lambda _, y: y + y.view(-1, 2, 3).flip(1).view(-1, 3)), f"the model {COUPLES}"),
        (Changed(lambda model, y: y - model.gate * y.mean(0)), f"the model {COUPLES}"),
        (Changed(lambda _, y: y * random.random()), f"the model {DRAWS}"),
        (Changed(counting), "the model or the objective returns different numbers when it runs again"),
        (Changed(keeping(lambda y: y.mean(0))), ""),
        (Changed(keeping(lambda y: y.sum(0))), "the model keeps statistics of a shard in its buffers"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_models(model: nn.Module, found: str) -> None:
    assert probe(model, Classification(), samples()).text == found


def losing(score: Callable[[Any, Tensor, Tensor], Loss]) -> Objective:
    class Own(Objective):
        def loss(self, model: Model, batch: object) -> Loss:
            return score(model, *split_batch(batch))

    return Own()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Loss:
    return Loss(functional.cross_entropy(outputs, targets, reduction="sum"), float(len(targets)))


def contrastive(outputs: Tensor) -> Loss:
    ones = functional.normalize(outputs)
    return cross_entropy(ones @ ones.T, torch.arange(len(ones)))


def with_auxiliary_loss(model: Model, x: Tensor, y: Tensor) -> Loss:
    loss = cross_entropy(model(x), y)
    loss.extra = 0.01 * model.layers[0](x).mean(0).square().sum()  # type: ignore[attr-defined]
    return loss


@pytest.mark.parametrize(
    ("objective", "found"),
    [
        (Classification(class_weights=[1.0, 2.0, 7.0], label_smoothing=0.1), ""),
        (losing(lambda model, x, _: contrastive(model(x))), f"the objective {COUPLES}"),
        (losing(lambda model, x, y: cross_entropy(model(x + torch.randn_like(x)), y)), f"the objective {DRAWS}"),
        (losing(lambda model, x, y: cross_entropy(model(x + x.roll(1, 0)), y)), f"the objective {COUPLES}"),
        (losing(with_auxiliary_loss), f"the objective {COUPLES}"),
        (losing(lambda model, x, y: cross_entropy(model.layers(x), y)), ""),
        (losing(lambda model, x, _: contrastive(model.layers(x))), f"the model or the objective {COUPLES}"),
    ],
    ids=["weighted", "contrastive", "noise", "mixing", "auxiliary", "inside", "contrastive_inside"],
)
def test_objectives(objective: Objective, found: str) -> None:
    assert probe(mlp(), objective, samples()).text == found


class Reporting(nn.Module):
    """A model that reports the mean loss of its targets, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 7), nn.Linear(7, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(count: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for place in range(count):
        ids = torch.randint(5, (9,), generator=generator)
        yield ids, ids.where(torch.arange(9) >= place, -100)  # of each sample another number of targets counts


def test_a_mean_over_unequal_numbers_of_targets_does_not_couple() -> None:
    batch = [{"ids": ids, "labels": labels} for ids, labels in tokens()]
    assert probe(Reporting(), ModelComputesLoss(), batch) == Coupling()
    assert probe(nn.Sequential(nn.Embedding(5, 5)), LanguageModelling(), list(tokens())) == Coupling()


def test_generators_are_left_as_they_were() -> None:
    model = mlp(dropout=0.5)
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    probe(model, Classification(), samples())
    assert (torch.rand(1), random.random()) == expected


def test_samples_that_are_all_alike_show_nothing() -> None:
    assert probe(mlp(), Classification(), samples(1) * 8).not_probed == "the samples that were tried are all equal"


def test_two_samples_are_enough() -> None:
    assert probe(Changed(lambda _, y: y - y.mean(0)), Classification(), samples(4)).text == f"the model {COUPLES}"
