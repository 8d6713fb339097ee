"""Activation checkpointing and compiling under strategies that cut a model: the numbers stay those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.stepping import Case, oracle, train
from tests.support import reference
from tests.support.pool import Pool
from trainkit.strategies.model_transforms import ModelTransforms

GPT = Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3)
RESNET = Case(task="resnet", global_size=8, micro_size=4, num_steps=3, rate_scale=0.1)
FULL = ModelTransforms(recompute="full")
BOTH = ModelTransforms(recompute="full", compile_mode="default", backend="aot_eager")
SPREAD: dict[str, dict[str, Any]] = {
    "device_map": {"map": {"embed": "cpu", "rest": "/cpu:0"}},
    "fsdp": {"replicas": 2},
    "pipeline": {"stages": 2},
    "tensor_parallel": {"degree": 2},
}


@pytest.mark.parametrize("strategy", SPREAD)
def test_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    for rank in train(pool, case):
        assert reference.differences(rank.weights, oracle(case)) == []


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.long
def test_compiled_and_recomputed_blocks_train_as_the_reference_does(strategy: str, pool: Pool) -> None:
    case = replace(GPT, strategy=strategy, settings=SPREAD[strategy], shaping=BOTH)
    for rank in train(pool, case):
        assert reference.differences(rank.weights, oracle(case)) == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.slow
def test_a_block_recomputed_after_others_were_computed_draws_its_own_masks(schedule: str, pool: Pool) -> None:
    base = replace(GPT, model={"dropout": 0.3})
    (expected,) = train(pool, base)
    pipeline = {"stages": 2, "schedule": schedule}
    for rank in train(pool, replace(base, strategy="pipeline", settings=pipeline, shaping=FULL)):
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_batch_statistics_count_each_shard_once(strategy: str, pool: Pool) -> None:
    case = replace(RESNET, strategy=strategy, settings=SPREAD[strategy], shaping=FULL)
    (expected,) = train(pool, RESNET)
    for rank in train(pool, case):
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
