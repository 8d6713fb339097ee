"""Each rank of a run is planned with the tensors that it allocates itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainkit import api
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model
from trainkit.run.estimates.activations import Timeline, TracedPass
from trainkit.run.estimates.memory import DeviceMemory, part_memories
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.core.sharded.gathered_pass import GatheredPass, Gathering

ROOT = Path(__file__).resolve().parents[2]
GPT = (
    "recipe=python_source", "model.width=64", "model.num_layers=3", "model.context=32", "data.context=32",
    "data.max_bytes=20000",
)  # fmt: skip


def planned(*arguments: str) -> list[DeviceMemory]:
    plan = make_plan(api.compose(arguments).cfg)
    model = meta_model(plan)
    return part_memories(plan.resolved(lambda: model), model)


def summed(model: Model, batch: torch.Tensor) -> Loss:
    return Loss(loss_sum=model(batch).sum(), weight=1.0)


WEIGHT = 64 * 64 * 4
ROWS = 64 * 4
"""Bytes of a sample of the batch, and of the output of a layer for it."""


def gathered(*, accumulates: bool = False, sums_each: bool = True, reshard: bool = True) -> Timeline:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    precision = Precision(value="fp32")
    how = Gathering(num_ranks=2, precision=precision, by_gloo=False, reshard_after_forward=reshard, sums_each=sums_each)
    rank = GatheredPass(lambda model: list(model.children()), how)
    batch = torch.zeros(1, 64)
    traced = TracedPass(model=model, batch=batch, loss=summed, precision=precision, rank=rank, accumulates=accumulates)
    return traced.run()


def test_a_rank_of_fsdp_holds_what_it_gathers_and_sums() -> None:
    line = gathered()
    assert line.gradient_bytes() == 2 * WEIGHT // 2, "a half of each"
    # backward of the first layer: its flat and its whole weight, the last sum of gradients, and a half of that
    assert 3.5 * WEIGHT < line.peak().num_bytes <= 3.5 * WEIGHT + 8 * ROWS


def test_a_second_shard_of_fsdp_adds_no_gradients() -> None:
    line = gathered(accumulates=True)
    assert line.gradient_bytes() == 0
    assert line.peak().num_bytes <= 3 * WEIGHT + 8 * ROWS


def test_gradients_that_are_summed_last_are_whole_until_then() -> None:
    assert gathered(accumulates=True, sums_each=False).peak().num_bytes >= 4 * WEIGHT


def test_weights_that_stay_gathered_are_there_at_the_start_of_backward() -> None:
    stay, leave = gathered(reshard=False), gathered()
    assert stay.stored() - leave.stored() == WEIGHT, "the last module stays in any case"


def test_each_rank_of_a_pipeline_has_its_own_memory() -> None:
    (alone,) = planned("recipe=digits", "model.hidden=[256,256]")
    first, last = planned("recipe=digits", "model.hidden=[256,256]", "strategy=pipeline", "strategy.stages=2")
    assert (first.part, last.part) == (0, 1)
    assert first.held.parameter_bytes + last.held.parameter_bytes == alone.held.parameter_bytes
    assert first.held.parameter_bytes != last.held.parameter_bytes


@pytest.mark.slow
def test_a_rank_of_tensor_parallelism_holds_a_part_of_the_activations() -> None:
    (alone,) = planned(*GPT)
    (cut,) = planned(*GPT, "strategy=tensor_parallel", "strategy.degree=2")
    assert alone.activations is not None
    assert cut.activations is not None
    assert 0.4 * alone.activations < cut.activations < 0.9 * alone.activations


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    ["cifar10; fsdp; none", "python_source; fsdp; full", "cifar10; pipeline; none"],
)
def test_the_peak_of_each_rank_is_within_a_tenth_of_the_plan(cell: str) -> None:
    command = [sys.executable, "benchmarks/plan_memory.py", "--only", cell]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (row,) = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("['")]
    assert float(row[3]) == pytest.approx(1, abs=0.02), "parameters, gradients and the optimizer"
    assert float(row[-1]) == pytest.approx(1, abs=0.1), "the peak"


@pytest.mark.parametrize(("micro_size", "sums"), [("null", 0), ("16", 1)], ids=["one shard", "several shards"])
def test_gradients_that_are_cast_for_the_masters_count_in_both_dtypes(micro_size: str, sums: int) -> None:
    (found,) = planned(
        "recipe=digits", "precision=bf16", "model.hidden=[600,600]", "optimizer.fused=true",
        f"batch.micro_size={micro_size}",
    )  # fmt: skip
    sizes = [64 * 600, 600, 600 * 600, 600, 600 * 10, 10]
    lasting = found.held.total_bytes - found.held.gradient_bytes
    # All in fp32, and those of the largest layer and of later ones in bf16 still.
    one = 4 * sum(sizes[:3]) + 2 * sum(sizes[2:])
    # The sums in fp32, the layer that is cast, the one that was cast before, and bf16.
    several = 4 * sum(sizes) + 4 * (sizes[1] + sizes[2]) + 2 * sum(sizes[2:])
    assert (found.moment, found.peak) == ("backward", lasting + (several if sums else one))
