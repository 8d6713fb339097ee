"""Several optimizers: phases of a step train as a hand-written loop, and alike under every strategy that takes them.

A phase that also updates the parameters of another optimizer, or is repeated after an overflow of a later one is caught
here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tests.contract.checks import alone, assert_bits, assert_close
from tests.contract.stepping import RATES, TASKS, Case, Trained, Trial, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.numerics.batch import SampleOrder
from trainkit.objectives.adversarial import Adversarial
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.strategies.base import NamedOptimizer, Phase

pytestmark = pytest.mark.pairwise


class Networks(nn.Module):
    """A generator and a discriminator of points, with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 6, bias=False))
        self.discriminator = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, inputs: Tensor, part: str) -> Tensor:
        if part == "generator":
            return self.generator(inputs)  # type: ignore[no-any-return]
        return self.discriminator(inputs.flatten(1)).squeeze(1)  # type: ignore[no-any-return]


class Duel(Objective):
    """An adversarial objective whose noise is taken of the samples."""

    phases: ClassVar[tuple[str, ...]] = ("discriminator", "generator")
    draws_nothing: ClassVar[bool] = True

    def loss(self, model: Model, batch: Any) -> Loss:
        points = batch[0]
        with torch.no_grad():
            fake = model(points[:, :3], "generator")
        total = softplus(-model(points, "discriminator")).sum() + softplus(model(fake, "discriminator")).sum()
        return Loss(total, len(points))

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        if phase == "discriminator":
            return self.loss(model, batch)
        points = batch[0]
        total = softplus(-model(model(points[:, :3], "generator"), "discriminator")).sum()
        return Loss(total, len(points))


class Steep(Duel):
    """A duel whose generator overflows at loss scales that the discriminator takes."""

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        loss = super().phase_loss(phase, model, batch)
        return replace(loss, loss_sum=loss.loss_sum * 2.0**10) if phase == "generator" else loss


TASKS["duel"] = Trial(Networks, zoo.Points, zoo.classes_sum, Duel)
TASKS["steep"] = Trial(Networks, zoo.Points, zoo.classes_sum, Steep)
TASKS["drawn duel"] = Trial(Networks, zoo.Points, zoo.classes_sum, partial(Adversarial, latent=3))

MAKERS: dict[str, Any] = {
    "generator": lambda params: torch.optim.AdamW(list(params), lr=0.05, weight_decay=0.1),
    "discriminator": lambda params: torch.optim.SGD(list(params), lr=0.1, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Match(Case):
    """A training with one optimizer a network, whose learning rates move apart."""

    task: str = "duel"
    num_steps: int = 6
    global_size: int = 8
    micro_size: int = 4
    phases: tuple[Phase, ...] = (Phase(name="discriminator"), Phase(name="generator"))

    def make_optimizers(self, model: nn.Module) -> tuple[NamedOptimizer, ...]:
        names = [name for name, _ in model.named_parameters()]
        return tuple(
            NamedOptimizer(
                name=phase.name,
                params=frozenset(name for name in names if name.startswith(phase.name)),
                make=lambda params, phase=phase: MAKERS[phase.name](params.values()),  # type: ignore[misc]
                factor=lambda step, phase=phase: factor_of(phase.name, step),  # type: ignore[misc]
            )
            for phase in self.phases
        )


RATIOS = (Phase(name="discriminator", repeats=2), Phase(name="generator", every=2))


def factor_of(name: str, step: int) -> float:
    return RATES[step] if name == "generator" else 1.0


def by_hand(case: Match) -> dict[str, Tensor]:
    """What a plain loop trains: a batch at a time, without shards."""
    model, data = Networks().double(), zoo.Points()
    order, objective = SampleOrder(num_samples=len(data), seed=case.seed), Duel()
    optimizers = {phase.name: MAKERS[phase.name](getattr(model, phase.name).parameters()) for phase in case.phases}
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    for step in range(case.num_steps):
        start = step * case.global_size
        points = data.tensors()[0][order.indices(0, start, start + case.global_size)].double()
        for phase in case.phases:
            for _ in range(phase.num_passes(step)):
                params = list(getattr(model, phase.name).parameters())
                loss = objective.phase_loss(phase.name, model, (points, None))
                grads = torch.autograd.grad(loss.loss_sum / case.global_size, params)
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
                scale = 1.0 if case.max_norm is None else min(1.0, case.max_norm / (float(norm) + 1e-6))
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad * scale
                optimizers[phase.name].param_groups[0]["lr"] = rates[phase.name] * factor_of(phase.name, step)
                optimizers[phase.name].step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_states(ranks: Sequence[Trained], expected: Trained) -> None:
    """Hold weights and slots of each rank to another training."""
    for rank in ranks:
        torch.testing.assert_close(rank.state, expected.state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Match(micro_size=8, num_steps=4),
        Match(micro_size=8, num_steps=4, max_norm=0.3),
        Match(micro_size=8, num_steps=4, phases=RATIOS),
    ],
    ids=["once each", "clipped", "ratios"],
)
def test_phases_train_as_a_loop_written_by_hand(case: Match, pool: Pool) -> None:
    (trained,) = train(pool, case)
    torch.testing.assert_close(trained.weights, by_hand(case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("task", ["duel", "drawn duel"])
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("mirrored", {"replicas": 2}),
        ("mirrored", {"replicas": 2, "reduce": "shared_memory"}),
        ("multi_worker_mirrored", {"replicas": 2, "bucket_mb": 0.0001}),
        ("fsdp", {"replicas": 2}),
        ("fsdp", {"replicas": 2, "sync": "last", "reshard_after_forward": False}),
        ("mesh", {"replicate": 2, "shard": 2}),
        ("device_map", {}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_phases_train_as_on_one_device_also_after_a_resume(
    task: str, strategy: str, settings: dict[str, Any], pool: Pool
) -> None:
    case = Match(task=task, max_norm=0.5)
    ranks, expected = train(pool, replace(case, strategy=strategy, settings=settings, resume_at=3)), alone(case)
    assert_states(assert_close(ranks, expected, atol=1e-12), expected)


@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_lanes_give_phases_the_same_bits_on_two_replicas(strategy: str, pool: Pool) -> None:
    case = Match(reproducible=True, micro_size=2, num_steps=4, max_norm=0.3)
    assert_bits(train(pool, replace(case, strategy=strategy, settings={"replicas": 2})), alone(case))


def test_an_overflow_repeats_its_phase_and_not_the_ones_before_it(pool: Pool) -> None:
    case = Match(task="steep", precision="fp16_mixed", num_steps=4)
    (trained,) = train(pool, case)
    (plain,) = train(pool, replace(case, task="duel"))
    assert trained.scale < plain.scale
    steps = {float(tensor) for key, tensor in trained.state.items() if key.startswith("optimizer/step/generator")}
    assert steps == {4.0}
    first = "discriminator.0.weight"
    assert not torch.equal(trained.weights[first], Networks().state_dict()[first])


@dataclass(frozen=True, kw_only=True)
class Halves(Case):
    """One objective without phases; an optimizer for the first layer, one for the rest, both set alike."""

    def make_optimizers(self, model: nn.Module) -> tuple[NamedOptimizer, ...]:
        names = [name for name, _ in model.named_parameters()]
        return tuple(
            NamedOptimizer(
                name=name,
                params=frozenset(params),
                make=lambda params: torch.optim.AdamW(list(params.values()), lr=0.5, weight_decay=0.1, fused=True),
                factor=lambda step: self.rate(step) / 0.5,
            )
            for name, params in (("body", names[:2]), ("head", names[2:]))
        )


def test_two_optimizers_that_are_set_alike_give_the_bits_of_one(pool: Pool) -> None:
    expected = alone(Case(optimizer="adamw", micro_size=4, max_norm=0.5))
    (rank,) = assert_bits(train(pool, Halves(optimizer="adamw", micro_size=4, max_norm=0.5)), expected)
    assert rank.state.keys() == expected.state.keys()


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("parameter_server", {"workers": 2, "servers": 2}),
        ("parameter_server", {"workers": 1, "servers": 2, "mode": "async"}),
        ("central_storage", {"compute_devices": ["cpu", "cpu"]}),
        ("central_storage", {"compute_devices": ["cpu"], "mode": "async"}),
        ("mesh", {"shard": 2, "tensor": 2, "plan": {"0": "colwise", "2": "rowwise"}}),
    ],
    ids=str,
)
def test_variables_in_one_place_and_cut_layers_have_several_optimizers(
    strategy: str, settings: dict[str, Any], pool: Pool
) -> None:
    case = Halves(optimizer="adamw", model={"width": 8}, micro_size=4, max_norm=0.5)
    assert_states(train(pool, replace(case, strategy=strategy, settings=settings, resume_at=4)), alone(case))
