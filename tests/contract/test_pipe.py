"""Stages along one axis of a mesh, each of which is a mesh of the other axes, are the training of one device.

A stage that exchanges its shards with another stage, or fills up microbatches with samples that count, is caught here
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.checks import alone, assert_close
from tests.contract.stepping import Case, oracle, train
from tests.contract.test_mesh import FROZEN, check
from tests.contract.test_mesh import GPT as UNEVEN
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.model_transforms import ModelTransforms

GPT = replace(UNEVEN, micro_size=2)
MESHES: dict[str, dict[str, int]] = {
    "pipe": {"shard": 1, "pipe": 2},
    "pipe x shard": {"shard": 2, "pipe": 2},
    "pipe x tensor": {"shard": 1, "pipe": 2, "tensor": 2},
    "pipe x replicate x shard": {"replicate": 2, "shard": 2, "pipe": 2},
    "pipe x shard x tensor": {"shard": 2, "pipe": 2, "tensor": 2},
}


@pytest.mark.parametrize("name", MESHES)
def test_stages_on_a_mesh_train_as_the_reference(name: str, pool: Pool) -> None:
    check(replace(GPT, settings=MESHES[name]), pool)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (GPT, {"schedule": "gpipe"}),
        (GPT, {"schedule": "interleaved", "virtual_stages": 2}),
        (replace(GPT, micro_size=3), {}),
        (replace(GPT, global_size=10, micro_size=1, num_steps=5), {}),
        (replace(GPT, global_size=4, micro_size=4, num_steps=5), {}),
        (replace(GPT, shaping=ModelTransforms(recompute="full"), num_steps=4), {}),
        (replace(GPT, resume_at=3), {}),
        (replace(FROZEN, micro_size=2), {}),
    ],
    ids=["gpipe", "interleaved", "ragged", "accumulated", "idle", "recomputed", "resumed", "frozen"],
)
def test_sharded_stages_train_as_the_reference(base: Case, settings: dict[str, Any], pool: Pool) -> None:
    check(replace(base, settings={**MESHES["pipe x shard"], **settings}), pool)


NET = Case(strategy="mesh", task="classes", model={"width": 8, "norm": True}, global_size=12, micro_size=4)


class Even(zoo.Points):
    """Three batches of three microbatches: one rank along shard has two, the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.targets = self.inputs[:36], self.targets[:36]


def test_batch_statistics_of_sharded_stages_are_summed_over_samples(pool: Pool) -> None:
    check(replace(NET, samples=Even, settings=MESHES["pipe x shard"], max_norm=0.05), pool)


def test_microbatches_of_coupled_samples_are_not_filled_up(pool: Pool) -> None:
    case = replace(NET, settings=MESHES["pipe x shard"], global_size=16)
    with pytest.raises(Exception, match=r"micro_size=4: gives microbatches of \d and 4 samples, which 1 couples"):
        train(pool, case)


def test_dropout_in_sharded_stages_is_that_of_one_device(pool: Pool) -> None:
    base = replace(GPT, model={"bias": False, "dropout": 0.3}, num_steps=2)  # then shards are of other sizes
    assert_close(train(pool, replace(base, settings=MESHES["pipe x shard"])), alone(base), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", "fp32"])
@pytest.mark.parametrize("name", ["pipe x shard", "pipe x tensor"])
def test_in_another_precision_stages_are_those_of_one_device_up_to_rounding(
    name: str, precision: str, pool: Pool
) -> None:
    base = replace(GPT, optimizer="sgd", precision=precision, num_steps=4)
    expected, close = alone(base).losses, 1e-4 if precision == "fp32" else 0.03
    for rank in train(pool, replace(base, settings=MESHES[name])):
        assert rank.losses == pytest.approx(expected, rel=close)


def test_an_overflow_in_stages_of_all_axes_is_tried_again(pool: Pool) -> None:
    base = replace(GPT, precision="fp16_mixed", rate_scale=0.1, settings=MESHES["pipe x shard x tensor"], micro_size=4)
    ranks = train(pool, base)
    assert {rank.scale for rank in ranks} == {ranks[0].scale}
    assert ranks[0].losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)


class Owning(nn.Module):
    """A model with a parameter of its own, outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs * self.scale))
        return outputs


def test_what_stages_do_not_take_is_refused_by_name() -> None:
    def said(settings: dict[str, Any], model: nn.Module | None = None, **facts: Any) -> str:
        strategy, context = replace(GPT, settings=settings).make_strategy(), PlanContext(**facts)
        problems = strategy.validate(context)
        (problem,) = problems or strategy.validate_model((model or GPT.make_model()).to("meta"), context)
        return str(problem)

    both = MESHES["pipe x shard"]
    assert said({**both, "schedule": "zero_bubble"}).startswith("strategy.schedule=zero_bubble: computes the gradients")
    assert said({**both, "reduce": "ring"}).startswith("strategy.reduce=ring: does not work with several stages")
    assert said({"shard": 2, "schedule": "gpipe"}).startswith("strategy.schedule=gpipe: has no effect with one rank")
    assert said(both, numerics=Numerics(reproducible=True)).startswith("numerics.reproducible=true: does not work with")
    assert said(both, Owning()).startswith("model: scale is in no block, and shard gathers")
    cut = {"shard": 1, "pipe": 2, "tensor": 2, "plan": {"first": "colwise", "second": "rowwise"}}
    assert said(cut, Owning()).startswith("strategy.plan.first=colwise: colwise cuts activations between first and")
