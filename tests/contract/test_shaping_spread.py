"""Activation checkpointing and compiling under strategies that cut a model: the numbers stay those of one device.

A recomputed block of a cut model that draws by the order of computation instead of its shard is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.stepping import Case, oracle, run_rank, train
from tests.support import reference
from tests.support.pool import Place, Pool
from trainkit.strategies.base import PlanContext
from trainkit.strategies.model_transforms import ModelTransforms

GPT = Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3)
RESNET = Case(task="resnet", global_size=8, micro_size=4, num_steps=3, rate_scale=0.1)
FULL = ModelTransforms(recompute="full")
COMPILED = ModelTransforms(compile_mode="default", backend="aot_eager")
BOTH = ModelTransforms(recompute="full", compile_mode="default", backend="aot_eager")
SPREAD: dict[str, dict[str, Any]] = {
    "one_device": {},
    "mirrored": {"replicas": 2},
    "device_map": {"map": {"embed": "cpu", "rest": "/cpu:0"}},
    "fsdp": {"replicas": 2},
    "pipeline": {"stages": 2},
    "tensor_parallel": {"degree": 2},
}


@pytest.mark.parametrize("strategy", SPREAD)
def test_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    assert_reference(train(pool, case), case)


def graphs_of_a_rank(place: Place | None, case: Case) -> tuple[int, dict[str, Tensor]]:
    """How many graphs a rank has compiled, and the weights that it ends with."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    weights = run_rank(place, case).weights
    return counters["stats"]["unique_graphs"] - before, weights


def compiled(pool: Pool, case: Case) -> list[dict[str, Tensor]]:
    """The weights of each rank, which has compiled something."""
    count = len(case.make_strategy().tasks(PlanContext()))
    task = "tests.contract.test_shaping_spread.graphs_of_a_rank"
    ranks = [graphs_of_a_rank(None, case)] if count == 1 else pool.run(task, case, num_ranks=count)
    assert min(graphs for graphs, _ in ranks) > 0
    return [weights for _, weights in ranks]


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.long
def test_compiled_and_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=BOTH)
    for weights in compiled(pool, case):
        assert reference.differences(weights, oracle(case)) == []


@pytest.mark.long
def test_compiled_layers_that_are_cut_draw_the_masks_of_eager_ones(pool: Pool) -> None:
    settings = {"degree": 2, "replicas": 2}
    case = replace(GPT, strategy="tensor_parallel", settings=settings, model={"dropout": 0.3})
    for eager, found in zip(train(pool, case), compiled(pool, replace(case, shaping=COMPILED)), strict=True):
        torch.testing.assert_close(found, eager.weights, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.slow
def test_a_block_recomputed_after_others_were_computed_draws_its_own_masks(schedule: str, pool: Pool) -> None:
    base = replace(GPT, model={"dropout": 0.3})
    case = replace(base, strategy="pipeline", settings={"stages": 2, "schedule": schedule}, shaping=FULL)
    assert_close(train(pool, case), alone(base), rtol=1e-10)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_batch_statistics_count_each_shard_once(strategy: str, pool: Pool) -> None:
    case = replace(RESNET, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    assert_close(train(pool, case), alone(RESNET), rtol=1e-9, atol=1e-12)
