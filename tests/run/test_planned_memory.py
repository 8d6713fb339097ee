"""The memory that is planned is the memory that a step takes, with activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.support.storages import Counting
from trainkit import api
from trainkit.cli import main
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model
from trainkit.objectives.classification import Classification
from trainkit.run.estimates.activations import Timeline, TracedPass
from trainkit.run.estimates.memory import DeviceMemory, device_memory
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import make_plan
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
        WIDE,
        (*WIDE, "batch.micro_size=128", "optimizer.fused=true"),
        GPT,
        (*GPT, "activation_checkpointing=full"),
        (*GPT, "activation_checkpointing=selective"),
        (*GPT, "precision=bf16_mixed"),
        (*GPT, "precision=bf16", "batch.micro_size=8"),
        (*WIDE, *GROUP, "batch.micro_size=128", "strategy.bucket_mb=1"),
        (*WIDE, *GROUP, "precision=bf16", "strategy.bucket_mb=1"),
        (*WIDE, *GROUP),
    ],
    ids=[
        "wide",
        "shards",
        "gpt",
        "recomputed",
        "selective",
        "mixed",
        "masters",
        "buckets",
        "masters in buckets",
        "one bucket",
    ],
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
    [WIDE, (*WIDE, *GROUP), (*GPT, "precision=bf16"), ("recipe=cifar10", "data=synthetic", "data.shape=[3,32,32]")],
    ids=["whole", "in a group", "masters", "with buffers"],
)
@pytest.mark.slow
def test_the_planned_copy_of_the_state_is_the_one_that_a_run_allocates(
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


def test_a_pass_is_traced_of_a_model_that_keeps_a_computed_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    batch = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)
    traced = TracedPass(model=model, batch=batch, loss=Classification().loss, precision=Precision()).run()
    assert len(traced.gradients) == 2


def test_each_place_holds_what_its_modules_compute() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4), nn.Tanh())
    line = traced(model, places={"0": 0, "1": 0, "2": 1, "3": 1})
    assert line.stored(0) >= 8 * 64 * 4
    assert line.stored(1) < 1000
    assert line.stored(0) + line.stored(1) == line.stored()
    assert line.gradient_bytes(0) == (4 * 64 + 64) * 4
    assert line.gradient_bytes(1) == (4 * 64 + 4) * 4


def test_an_evaluation_that_reads_numbers_is_unknown_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(self: Classification, model: Model, batch: tuple[torch.Tensor, ...]) -> Loss:
        found = self.score(model(batch[0]), batch[1])
        return found if torch.is_grad_enabled() else Loss(found.loss_sum, float(found.loss_sum))

    monkeypatch.setattr(Classification, "loss", reads)
    found = planned("recipe=digits")
    assert (found.peak, found.moment, found.evaluation) == (found.step, "backward", None)
    assert found.notes()[0].startswith("activations of an evaluation are not known: the model or the objective reads")


@pytest.mark.parametrize(
    ("hardware", "more", "mib"),
    [
        ("h200", "seed=0", 64),
        ("a100_80gb", "seed=0", 16.25),
        ("a100_80gb", "numerics.reproducible=true", 64),
        ("mi300x", "seed=0", 0),
    ],
)
def test_the_workspaces_of_cublas_count_on_hardware_that_has_them(hardware: str, more: str, mib: float) -> None:
    found, without = planned("recipe=digits", more, f"hardware={hardware}"), planned("recipe=digits", more)
    assert found.held.workspace_bytes == mib * 2**20
    assert found.step == (without.step or 0) + mib * 2**20
    assert (f"workspaces of cuBLAS {mib:.3g} MiB" in dict(found.rows())["memory a device"]) == (mib > 0)


def test_a_run_on_a_gpu_with_figures_counts_its_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(api.compose(["recipe=digits"]).cfg, num_gpus=1)
    model = meta_model(plan)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert device_memory(plan, model).held.workspace_bytes == 0, "a plan alone uses no GPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_memory(plan, model).held.workspace_bytes == 64 * 2**20


def test_an_objective_that_reads_numbers_leaves_the_activations_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(_self: object, model: Model, batch: tuple[torch.Tensor, ...]) -> Loss:
        total = model(batch[0]).sum()
        return Loss(loss_sum=total * float(total), weight=1.0)

    monkeypatch.setattr("trainkit.objectives.classification.Classification.loss", reads)
    found = planned("recipe=digits")
    assert (found.peak, found.activations, found.evaluation) == (None, None, None)
    assert found.notes() == [
        (
            "activations are not known: the model or the objective reads the values of a tensor (.item(), float(), "
            "if, a mask)."
        )
    ]


def test_a_timeline_of_a_training_counts_gradients_of_an_earlier_shard_apart() -> None:
    model = nn.Linear(4, 4)
    assert traced(model, accumulates=True).gradient_bytes() == 0
    assert traced(model).gradient_bytes() == (16 + 4) * 4


def test_microbatches_in_flight_are_those_of_the_schedule() -> None:
    def counts(schedule: str, count: int, v: int = 1) -> list[int]:
        return [
            most_in_flight(schedule, count, place=place, num_ranks=2, stages_a_rank=v)  # type: ignore[arg-type]
            for place in range(2)
        ]

    assert counts("gpipe", 8) == [8, 8]
    assert counts("1f1b", 8) == [2, 1]
    assert counts("1f1b", 1) == [1, 1]
    assert counts("interleaved", 8, 2) == [3, 2]


def test_the_plan_as_json_has_bytes_a_device(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=digits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    memory = found["memory"]
    assert (found["version"], found["fits"]) == (1, None)
    assert memory["moment"] == "evaluation"
    assert memory["peak"] == memory["evaluation"] > memory["step"] > 0 == memory["workspaces"]
    assert memory["peak"] > memory["parameters"] + memory["optimizer"] + memory["activations"]
    assert list(cwd.iterdir()) == []
