"""A plan whose peak is a tenth above or below the memory that a real step takes is caught here alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.present import present
from tests.support.storages import Counting
from trainkit import api
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model
from trainkit.objectives.classification import Classification
from trainkit.run.estimates.activations import Timeline, TracedPass
from trainkit.run.estimates.memory import DeviceMemory, device_memory, part_memories
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.mesh.gathered_pass import GatheredPass, Gathering
from trainkit.strategies.pipeline.schedules import most_in_flight
from trainkit.trainer.checkpoint.snapshot import Snapshot

SHORT = ("callbacks=[]", "logger=[]", "stop_at_step=3", "checkpoint.export=false", "quiet=true")
GROUP = ("strategy=mirrored", "strategy.replicas=1", "strategy.process_group=always")
WIDE = ("recipe=digits", "model.hidden=[1024,1024]", "batch.global_size=512")
GPT = (
    "recipe=python_source", "model.width=64", "model.num_layers=3", "model.context=32", "data.context=32",
    "data.max_bytes=20000",
)  # fmt: skip


def planned(*arguments: str) -> DeviceMemory:
    plan = make_plan(api.compose(arguments).cfg)
    model = meta_model(plan)
    return device_memory(plan.resolved(lambda: model), model)


@pytest.mark.parametrize(
    "arguments",
    [
        (*WIDE, "batch.micro_size=128", "optimizer.fused=true"),
        (*GPT, "activation_checkpointing=full"),
        (*GPT, "activation_checkpointing=selective"),
        (*GPT, "precision=bf16_mixed"),
        (*GPT, "precision=bf16", "batch.micro_size=8"),
        (*WIDE, *GROUP, "batch.micro_size=128", "strategy.bucket_mb=1"),
        (*WIDE, *GROUP, "precision=bf16", "strategy.bucket_mb=1"),
    ],
    ids=["shards", "recomputed", "selective", "mixed", "masters", "buckets", "masters in buckets"],
)
@pytest.mark.slow
def test_the_planned_peak_is_that_of_a_step(arguments: tuple[str, ...], cwd: Path) -> None:
    found = planned(*arguments)
    with Counting() as counting:
        api.train(api.compose([*arguments, *SHORT]))
    held = found.held
    lasting = held.parameter_bytes + held.gradient_bytes + (held.optimizer_bytes or 0)
    assert found.step is not None
    assert lasting == pytest.approx(counting.lasting, rel=0.1), "with the batches and the data"
    step = found.step - held.staging_bytes  # a thread allocates the copy, where no operation is counted
    assert step == pytest.approx(counting.peak, rel=0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipe=cifar10", "data=synthetic", "data.shape=[3,32,32]", "data.num_samples=64", "data.val_samples=128"),
        (*GPT, "model.vocab_size=2048", "objective.cross_entropy=plain", "precision=bf16_mixed"),
    ],
    ids=["convnet", "gpt"],
)
@pytest.mark.slow
def test_the_planned_peak_of_an_evaluation_is_the_measured_one(arguments: tuple[str, ...], cwd: Path) -> None:
    own = (*arguments, "batch.global_size=2", "eval.batch_size=16", "checkpoint.background=false")
    found = planned(*own)
    with Counting() as counting:
        api.train(api.compose([*own, *SHORT, "eval.every_steps=1"]))
    assert (found.moment, found.peak) == ("evaluation", found.evaluation)
    assert found.evaluation == pytest.approx(counting.peak, rel=0.03), "outputs of an earlier batch are freed"


@pytest.mark.parametrize(
    "arguments",
    [(*WIDE, *GROUP), (*GPT, "precision=bf16"), ("recipe=cifar10", "data=synthetic", "data.shape=[3,32,32]")],
    ids=["in a group", "masters", "with buffers"],
)
@pytest.mark.slow
def test_a_run_copies_the_state_as_planned(
    arguments: tuple[str, ...], cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, taken = planned(*arguments).held, list[int]()
    release = Snapshot.release

    def counted(snapshot: Snapshot) -> None:
        taken.append(sum(buffer.nbytes for buffer in snapshot.buffers.values()))
        release(snapshot)

    monkeypatch.setattr(Snapshot, "release", counted)
    api.train(api.compose([*arguments, *SHORT]))
    assert taken == [held.staging_bytes]
    without = planned(*arguments, "checkpoint.background=false").held
    assert (without.staging_bytes, held.total_bytes - without.total_bytes) == (0, held.staging_bytes)


def summed(model: Model, batch: torch.Tensor) -> Loss:
    return Loss(loss_sum=model(batch).sum(), weight=1.0)


def traced(model: nn.Module, **settings: object) -> Timeline:
    batch = torch.zeros(8, 4)
    return TracedPass(model=model, batch=batch, loss=summed, precision=PRECISION, **settings).run()  # type: ignore[arg-type]


PRECISION = make_plan(api.compose(["recipe=digits"]).cfg).components.precision


def test_each_place_holds_what_its_modules_compute() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4), nn.Tanh())
    line = traced(model, places={"0": 0, "1": 0, "2": 1, "3": 1})
    assert line.stored(0) >= 8 * 64 * 4
    assert line.stored(1) < 1000
    assert line.stored(0) + line.stored(1) == line.stored()
    assert line.gradient_bytes(0) == (4 * 64 + 64) * 4
    assert line.gradient_bytes(1) == (4 * 64 + 4) * 4


@pytest.mark.parametrize("trains", [True, False])
def test_what_reads_numbers_is_unknown_and_nothing_else(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(self: Classification, model: Model, batch: tuple[torch.Tensor, ...]) -> Loss:
        found = self.score(model(batch[0]), batch[1])
        return found if trains and torch.is_grad_enabled() else Loss(found.loss_sum, float(found.loss_sum))

    monkeypatch.setattr(Classification, "loss", reads)
    found = planned("recipe=digits")
    assert found.evaluation is None
    assert (found.peak is not None, found.activations is not None) == (trains, trains)
    if trains:
        assert (found.peak, found.moment) == (found.step, "backward")
        assert found.notes()[0].startswith("activations of an evaluation are not known")
    else:
        (note,) = found.notes()
        assert note == (
            "activations are not known: the model or the objective reads the values of a tensor (.item(), float(), "
            "if, a mask)."
        )


@pytest.mark.parametrize(
    ("hardware", "more", "mib"),
    [("h200", "seed=0", 64), ("a100_80gb", "seed=0", 16.25), ("a100_80gb", "numerics.reproducible=true", 64),
     ("mi300x", "seed=0", 0)],
)  # fmt: skip
def test_the_workspaces_of_cublas_count_on_hardware_that_has_them(hardware: str, more: str, mib: float) -> None:
    found, without = planned("recipe=digits", more, f"hardware={hardware}"), planned("recipe=digits", more)
    assert found.held.workspace_bytes == mib * 2**20
    assert found.step == (without.step or 0) + mib * 2**20


def test_a_run_on_a_gpu_with_figures_counts_its_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(api.compose(["recipe=digits"]).cfg, num_gpus=1)
    model = meta_model(plan)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for is_initialized, mib in ((False, 0), (True, 64)):  # a plan alone uses no GPU
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda known=is_initialized: known)
        assert device_memory(plan, model).held.workspace_bytes == mib * 2**20


def test_gradients_of_an_earlier_shard_count_apart_and_microbatches_as_the_schedule_has_them_in_flight() -> None:
    assert traced(nn.Linear(4, 4), accumulates=True).gradient_bytes() == 0
    assert traced(nn.Linear(4, 4)).gradient_bytes() == (16 + 4) * 4

    def counts(schedule: Any, count: int, v: int = 1) -> list[int]:
        return [most_in_flight(schedule, count, place=place, num_ranks=2, stages_a_rank=v) for place in range(2)]

    assert (counts("gpipe", 8), counts("1f1b", 8), counts("1f1b", 1)) == ([8, 8], [2, 1], [1, 1])
    assert counts("interleaved", 8, 2) == [3, 2]


ROOT = Path(__file__).resolve().parents[2]
TENSOR_PARALLEL = ["strategy=tensor_parallel", "strategy.degree=2"]


def parts_planned(*arguments: str) -> list[DeviceMemory]:
    plan = make_plan(api.compose(arguments).cfg)
    model = meta_model(plan)
    return part_memories(plan.resolved(lambda: model), model)


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


def test_a_second_shard_of_fsdp_adds_no_gradients_unless_they_are_summed_last() -> None:
    line = gathered(accumulates=True)
    assert line.gradient_bytes() == 0
    assert line.peak().num_bytes <= 3 * WEIGHT + 8 * ROWS
    assert gathered(accumulates=True, sums_each=False).peak().num_bytes >= 4 * WEIGHT


def test_weights_that_stay_gathered_are_there_at_the_start_of_backward() -> None:
    stay, leave = gathered(reshard=False), gathered()
    assert stay.stored() - leave.stored() == WEIGHT, "the last module stays in any case"


def test_each_rank_of_a_pipeline_has_its_own_memory() -> None:
    (alone,) = parts_planned("recipe=digits", "model.hidden=[256,256]")
    first, last = parts_planned("recipe=digits", "model.hidden=[256,256]", "strategy=pipeline", "strategy.stages=2")
    assert (first.part, last.part) == (0, 1)
    assert first.held.parameter_bytes + last.held.parameter_bytes == alone.held.parameter_bytes
    assert first.held.parameter_bytes != last.held.parameter_bytes


@pytest.mark.slow
def test_a_rank_of_tensor_parallelism_holds_a_part_of_the_activations() -> None:
    alone, cut = (present(parts_planned(*GPT, *more)[0].activations) for more in ([], TENSOR_PARALLEL))
    assert 0.4 * alone < cut < 0.9 * alone


@pytest.mark.long
@pytest.mark.parametrize("cell", ["cifar10; fsdp; none", "python_source; fsdp; full", "cifar10; pipeline; none"])
def test_the_peak_of_each_rank_is_within_a_tenth_of_the_plan(cell: str) -> None:
    command = [sys.executable, "benchmarks/plan_memory.py", "--only", cell]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (row,) = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("['")]
    assert float(row[3]) == pytest.approx(1, abs=0.02), "parameters, gradients and the optimizer"
    assert float(row[-1]) == pytest.approx(1, abs=0.1), "the peak"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory")
def test_four_trainings_run_out_of_less_memory_than_planned_and_fit_into_more() -> None:
    command = [sys.executable, "benchmarks/plan_limits.py", "--every", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = ast.literal_eval(done.stdout.splitlines()[-1])
    assert counts == {("refused", "runs out"): 4, ("fits", "trains"): 4}, done.stdout + done.stderr


@pytest.mark.parametrize(("micro_size", "sums"), [("null", 0), ("16", 1)], ids=["one shard", "several shards"])
def test_gradients_that_are_cast_for_the_masters_count_in_both_dtypes(micro_size: str, sums: int) -> None:
    (found,) = parts_planned(
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
