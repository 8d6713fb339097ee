"""Steps that are not finite, errors and lost replicas: left out, trained again, saved before the end; phases too.

A step that is left out on one rank alone or logged twice after a rollback, a checkpoint that is saved in the middle of
an update, and a lost phase that also takes back the one before it are caught here alone.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from tests.contract.running import run, weights
from tests.contract.stepping import PLACES
from tests.support import failing, quick, reference, zoo
from tests.support.refusing import refused
from tests.support.results import result_of
from trainkit.callbacks.every_run import MetricsFile
from trainkit.errors import NonFiniteError, TrainingError
from trainkit.fields import placement
from trainkit.objectives.adversarial import Adversarial
from trainkit.objectives.base import Loss, Model
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import list_complete

ORDER = reference.order(37, seed=3, epoch=0)
BAD = ORDER[20]
"""A sample of step 1 of the first epoch."""
EVERY = str(list(range(37))).replace(" ", "")
FIXED = ("model=net", "batch.global_size=16", "batch.micro_size=8", "optimizer=sgd", "optimizer.lr=0.1")
POISONED = (*FIXED, "schedule=constant", "data=poisoned", f"data.bad=[{BAD}]", "checkpoint.every_steps=2")
ODD = (*FIXED, "schedule=constant", "data=points", "objective=odd", f"objective.bad={BAD}", "steps=3")
ALIKE = {
    **{strategy: tuple(f"strategy.{key}={value}" for key, value in keys.items()) for strategy, keys in PLACES.items()},
    "device_map": ("strategy.devices=[cpu,cpu]",),
    "parameter_server": ("numerics.reproducible=true",),
}
QUICK = ("one_device", "device_map", "central_storage", "mirrored")
"""Strategies that start quickly, and one that needs processes; the others are for the long form."""


def lanes(*names: str) -> list[Any]:
    """Every strategy; the others than these are for the long form."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in ALIKE]


def expected(*, leave_out: tuple[int, ...], num_steps: int = 3) -> reference.Trained:
    data = zoo.Points()
    return reference.train(
        zoo.Net(), [data[index] for index in range(37)], zoo.classes_sum, optimizer=reference.sgd(),
        rate=lambda _: 0.1, num_steps=num_steps, global_size=16, micro_size=8, seed=3, leave_out=leave_out,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_leaves_out_step_after_step_fails(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path / "run", *FIXED, "data=poisoned", f"data.bad={EVERY}", "epochs=45", "numerics.on_nonfinite=skip")
    assert str(caught.value) == (
        "numerics.max_skips_in_a_row=10: steps 0 to 9 were left out in a row, because loss or gradient was "
        "not finite; 10 of 10 steps were left out. Lower optimizer.lr, set clip.max_norm or add warmup.steps, see the "
        "samples under skipped_steps in result.json, or raise numerics.max_skips_in_a_row."
    )
    result = result_of(tmp_path / "run")
    assert result["status"] == "failed"
    assert [entry["step"] for entry in result["skipped_steps"]] == list(range(10))


@pytest.mark.slow
def test_a_run_that_leaves_out_too_large_a_share_fails_at_step_100(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path / "run", *POISONED, "steps=200", "numerics.on_nonfinite=skip", "numerics.max_skipped_share=0.3")
    assert str(caught.value) == (
        "numerics.max_skipped_share=0.3: 33 of 100 steps were left out, because loss or gradient was not finite: a "
        "share of 0.33 (steps 1, 5, 8, 9, 14, 16, 18, 21 and 25 more). Lower optimizer.lr, set clip.max_norm or add "
        "warmup.steps, see the samples under skipped_steps in result.json, or raise numerics.max_skipped_share."
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", lanes(*QUICK, "pipeline", "parameter_server"))  # fsdp steps as mirrored does
def test_a_bad_sample_costs_its_step_and_no_more(strategy: str, tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", *POISONED, "steps=3", "numerics.on_nonfinite=rollback", f"strategy={strategy}",
        *ALIKE[strategy],
    )  # fmt: skip
    samples = [int(sample) for sample in ORDER[16:32]]
    assert result["skipped_steps"] == [{"step": 1, "samples": samples, "num_samples": 16}]
    assert reference.differences(weights(result), expected(leave_out=(1,))) == []


@pytest.mark.parametrize("strategy", lanes(*QUICK))
@pytest.mark.slow
def test_a_step_that_is_finite_when_trained_again_leaves_no_trace(strategy: str, tmp_path: Path) -> None:
    settings = ("steps=7", "numerics.on_nonfinite=rollback", f"strategy={strategy}", *ALIKE[strategy])
    each = strategy == "pipeline"  # every stage reads; only the first one looks at the inputs
    healed = run(tmp_path / "healed", *POISONED, *settings, f"data.once={tmp_path}", f"data.each={each}")
    undisturbed = run(tmp_path / "undisturbed", *POISONED, *settings, "data.bad=[]")
    assert healed["weights_sha256"] == undisturbed["weights_sha256"]
    assert healed["rollbacks"] == [{"step": 1, "checkpoint": 0}]
    assert healed["skipped_steps"] == undisturbed["rollbacks"] == []


def test_a_second_bad_step_since_the_restored_checkpoint_ends_the_run(tmp_path: Path) -> None:
    settings: tuple[str, ...] = (*POISONED, "numerics.on_nonfinite=rollback", "eval.every_epochs=null", "steps=9")
    settings = tuple(setting for setting in settings if not setting.startswith("checkpoint."))
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path / "run", *settings)
    assert str(caught.value) == (
        "numerics.on_nonfinite=rollback: loss or gradient of step 5 is not finite, as in step 1; both follow the "
        "checkpoint of step 0, and at most one such step between two checkpoints is left out. "
        "Lower optimizer.lr, set clip.max_norm or add warmup.steps, save more often with checkpoint.every_steps, or "
        "use numerics.on_nonfinite=skip."
    )
    assert [entry["step"] for entry in result_of(tmp_path / "run")["skipped_steps"]] == [1]


@pytest.mark.slow
def test_a_run_killed_in_a_rollback_leaves_the_step_out_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise RuntimeError("killed")

    settings: tuple[str, ...] = (*POISONED, "numerics.on_nonfinite=rollback", "steps=3")
    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "rolled_back", die)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "run", *settings)
    result = run(tmp_path / "run", *settings, "resume=auto")
    assert result["rollbacks"] == [{"step": 1, "checkpoint": 0}]
    assert [entry["step"] for entry in result["skipped_steps"]] == [1]
    assert reference.differences(weights(result), expected(leave_out=(1,))) == []


@pytest.mark.slow
def test_a_resumed_run_still_lists_what_was_left_out_before(tmp_path: Path) -> None:
    settings: tuple[str, ...] = (*POISONED, "numerics.on_nonfinite=skip", "steps=3")
    run(tmp_path / "run", *settings, "stop_at_step=2")
    result = run(tmp_path / "run", *settings, "resume=auto")
    assert [entry["step"] for entry in result["skipped_steps"]] == [1]


def test_a_rolled_back_run_logs_each_step_once(tmp_path: Path) -> None:
    back = ("numerics.on_nonfinite=rollback", "steps=7", f"data.once={tmp_path}", "log_every_steps=1")
    run(tmp_path / "run", *POISONED, *back)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_loss_and_gradient_are_both_checked_on_all_ranks(kind: str, replicas: int, tmp_path: Path) -> None:
    # the second shard: that of rank 1, which writes no checkpoint
    result = run(
        tmp_path / "run", *ODD, f"objective.bad={ORDER[28]}", f"objective.kind={kind}", "numerics.on_nonfinite=skip",
        "strategy=mirrored", f"strategy.replicas={replicas}",
    )  # fmt: skip
    assert [entry["step"] for entry in result["skipped_steps"]] == [1]
    assert reference.differences(weights(result), expected(leave_out=(1,))) == []


def test_buffers_that_are_not_finite_leave_a_step_out(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *ODD, "objective.kind=buffer", "model.norm=true", "numerics.on_nonfinite=skip")
    assert [entry["step"] for entry in result["skipped_steps"]] == [1]
    assert all(tensor.isfinite().all() for tensor in weights(result).values())


def test_no_checkpoint_holds_weights_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path / "run", *ODD, "objective.kind=gradient", "checkpoint.every_steps=1")
    assert str(caught.value) == (
        "after step 2 the parameter 0.weight is not finite, and no checkpoint of it is written. Lower optimizer.lr, "
        "set clip.max_norm or add warmup.steps; numerics.on_nonfinite=skip skips steps whose loss or gradient is "
        "not finite."
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "where"), [(1, ""), (2, " on rank 0")])
def test_a_run_that_stops_names_step_rank_and_samples(replicas: int, where: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        run(tmp_path / "run", *POISONED, "steps=3", "strategy=mirrored", f"strategy.replicas={replicas}")
    samples = ", ".join(str(sample) for sample in ORDER[16:24])
    assert (
        f"step 1: the loss is nan{where}, of the samples {samples} and 8 more. Lower optimizer.lr, set clip.max_norm "
        "or add warmup.steps, or leave such steps out with numerics.on_nonfinite=skip."
    ) in str(caught.value)
    assert result_of(tmp_path / "run")["skipped_steps"] == []


def test_what_a_loss_scale_cannot_help_is_left_out_at_the_scale_of_before(tmp_path: Path) -> None:
    scaled = ("precision=fp16_mixed", "numerics.on_nonfinite=skip", "precision.max_overflows=4")
    result = run(tmp_path / "run", *ODD, "objective.kind=gradient", *scaled, "steps=2")
    meta = load(Path(result["last"])).meta
    assert [entry["step"] for entry in result["skipped_steps"]] == [1]
    assert meta["state"]["retries"] == 3
    assert meta["loss_scale"]["scale"] == 65536.0


@pytest.mark.slow
def test_skipped_samples_of_local_replicas_are_in_the_result_of_the_run(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", *POISONED, "strategy=local_sgd", "strategy.average_every=2", "steps=3",
        "numerics.on_nonfinite=skip",
    )  # fmt: skip
    assert result["skipped_steps"] == [{"step": 1, "samples": [int(i) for i in ORDER[16:24]], "num_samples": 8}]


def test_limits_of_skips_without_skip_are_refused(tmp_path: Path) -> None:
    limits = ("numerics.max_skips_in_a_row=3", "numerics.max_skipped_share=0.1")
    rule = "has no effect without numerics.on_nonfinite=skip. (command line)"
    assert refused(run, tmp_path / "run", *POISONED, *limits) == [f"{limit}: {rule}" for limit in limits]


SAVED = (
    "model=net", "model.norm=true", "model.dropout=0.3", "data=points", "batch.global_size=16", "batch.micro_size=5",
    "optimizer=adamw", "optimizer.lr=0.01", "steps=9", "schedule=linear", "clip.max_norm=0.5", "log_every_steps=1",
    "eval.every_steps=3", "eval.metric=val/loss", "checkpoint.every_epochs=null",
    "callbacks.failing={_target_:tests.support.failing.Failing}",
)  # fmt: skip
CENTRAL = "strategy=central_storage"
PHASES = ("data", "forward", "reduce", "update")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, Any]]:
    return {strategy: run(tmp_path_factory.mktemp("whole"), *SAVED, *strategy) for strategy in ((), (CENTRAL,))}


@pytest.fixture(autouse=True)
def _mended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    failing.planted.clear()
    failpoints.reload({})


def counts(folder: Path) -> list[int]:
    meta = json.loads((list_complete(folder / "checkpoints")[0].folder / "meta.json").read_text())
    return next(state["counts"] for name, state in meta["callbacks"].items() if name.endswith("Failing"))


def ends_alike(folder: Path, results: dict[tuple[str, ...], dict[str, Any]], saved_at: int, *overrides: str) -> None:
    """The last checkpoint is that of a step, and the run that goes on from it ends as one that was not disturbed."""
    assert [checkpoint.step for checkpoint in list_complete(folder / "checkpoints")][:1] == [saved_at]
    assert json.loads((folder / "result.json").read_text())["steps"] == saved_at
    failing.planted.clear()
    failpoints.reload({})
    result = run(folder, *SAVED, *overrides, "resume=auto")
    assert (result["status"], result["steps"]) == ("finished", 9)
    assert result["weights_sha256"] == results[overrides]["weights_sha256"]
    assert result["metrics"] == results[overrides]["metrics"]
    assert Path(result["best"]).name == Path(results[overrides]["best"]).name
    assert counts(folder) == [3, 6, 9]


LONG, MATRIX = pytest.mark.long, pytest.mark.matrix


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("step_end", 5),
        ("eval_end", 6),
        pytest.param("log", 5, marks=LONG),
        pytest.param("train_end", 9, marks=LONG),
    ],
)
@pytest.mark.slow
def test_an_error_of_a_callback_saves_the_step_before_it(
    tmp_path: Path, results: dict[tuple[str, ...], dict[str, Any]], hook: str, step: int
) -> None:
    failing.planted.add((hook, step))
    with pytest.raises(RuntimeError, match="planted"):
        run(tmp_path, *SAVED)
    ends_alike(tmp_path, results, step)


@pytest.mark.parametrize("strategy", [(), pytest.param((CENTRAL,), marks=LONG)], ids=["one_device", "central_storage"])
@pytest.mark.parametrize("phase", ["backward", *(pytest.param(phase, marks=MATRIX) for phase in PHASES)])
@pytest.mark.slow
def test_an_error_within_a_step_saves_the_step_before_it(
    tmp_path: Path, results: dict[tuple[str, ...], dict[str, Any]], phase: str, strategy: tuple[str, ...]
) -> None:
    """By backward the first shard has moved the statistics of batch normalisation: they are put back."""
    failpoints.reload({"TRAINKIT_FAIL": f"step=5,phase={phase},action=raise"})
    with pytest.raises(RuntimeError, match=f"failpoint in {phase} of step 5"):
        run(tmp_path, *SAVED, *strategy)
    ends_alike(tmp_path, results, 5, *strategy)


def test_an_error_within_an_update_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint stays the last one."""
    plain, calls = OptimizerStepper.step, []

    def interrupted(self: OptimizerStepper, *arguments: Any) -> None:
        plain(self, *arguments)
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("in the middle")

    monkeypatch.setattr(OptimizerStepper, "step", interrupted)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(tmp_path, *SAVED)
    assert [checkpoint.step for checkpoint in list_complete(tmp_path / "checkpoints")] == [3]


def test_an_error_in_the_first_step_saves_nothing(tmp_path: Path) -> None:
    failpoints.reload({"TRAINKIT_FAIL": "step=0,phase=backward,action=raise"})
    with pytest.raises(RuntimeError, match="failpoint"):
        run(tmp_path, *SAVED)
    assert not (tmp_path / "checkpoints").exists()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    failing.planted.add(("step_end", 2))
    with pytest.raises(RuntimeError, match="planted"):
        run(tmp_path, *SAVED, "optimizer.lr=1e308", "schedule=constant", "clip.max_norm=null", "log_every_steps=5")
    assert not (tmp_path / "checkpoints").exists()


def test_a_second_ctrl_c_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failing, "RuntimeError", KeyboardInterrupt, raising=False)
    failing.planted.add(("step_end", 2))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *SAVED)
    assert not (tmp_path / "checkpoints").exists()


GAN = ("recipe=gan", "epochs=null", "steps=5", "eval.every_epochs=null")
TWO = ("strategy=mirrored", "strategy.replicas=2")
CALLS = {"one_device": 4, "mirrored": 3}
"""Losses of a phase in a process before step 2, which has two shards; ranks compute one to agree on a layout."""


@dataclass(frozen=True, kw_only=True)
class Interrupted(Adversarial):
    """An adversarial objective with one loss that is not a number."""

    bad_phase: Annotated[str, placement] = ""
    """The phase of this loss."""
    bad_call: Annotated[int, placement] = 0
    """How often the phase has computed a loss before."""
    _calls: Any = field(default_factory=count, init=False, repr=False, compare=False)

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        loss = super().phase_loss(phase, model, batch)
        if phase == self.bad_phase and next(self._calls) == self.bad_call:
            return replace(loss, loss_sum=loss.loss_sum * torch.nan)
        return loss


def interrupted(phase: str, strategy: str, *more: str) -> tuple[str, ...]:
    """The settings of a training whose loss of one phase is once not a number, in step 2."""
    name = f"{Interrupted.__module__}.{Interrupted.__qualname__}"
    keys = f"{{_target_: {name}, latent: 16, bad_phase: {phase!r}, bad_call: {CALLS[strategy]}}}"
    return (*GAN, f"objective={keys}", *more, *(TWO if strategy == "mirrored" else ()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
@pytest.mark.parametrize(("phase", "updates"), [("discriminator", (4, 4)), ("generator", (5, 4))])
def test_a_skipped_step_ends_at_its_phase_and_keeps_the_updates_before(
    phase: str, updates: tuple[int, int], strategy: str, tmp_path: Path
) -> None:
    result = run(tmp_path / "run", *interrupted(phase, strategy, "numerics.on_nonfinite=skip"))
    assert [entry["step"] for entry in result["skipped_steps"]] == [2]
    tensors = load(Path(result["last"])).tensors
    steps = tuple(
        {float(tensor) for key, tensor in tensors.items() if key.startswith(f"optimizer/step/{name}")}
        for name in ("discriminator", "generator")
    )
    assert steps == ({float(updates[0])}, {float(updates[1])})


@pytest.mark.slow
def test_a_rollback_takes_every_phase_back(tmp_path: Path) -> None:
    rollback = ("numerics.on_nonfinite=rollback", "checkpoint.every_steps=1")
    healed = run(tmp_path / "healed", *interrupted("generator", "one_device", *rollback))
    undisturbed = run(tmp_path / "undisturbed", *interrupted("none", "one_device", *rollback))
    assert healed["rollbacks"] == [{"step": 2, "checkpoint": 2}]
    assert healed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_compiled_model_trains_its_phases_as_it_does_eagerly(tmp_path: Path) -> None:
    eager = weights(run(tmp_path / "eager", *GAN))
    compiled = weights(run(tmp_path / "compiled", *GAN, "compile.mode=default", "compile.backend=aot_eager"))
    assert eager.keys() == compiled.keys()
    for name, tensor in eager.items():
        assert torch.allclose(compiled[name], tensor, rtol=1e-12, atol=1e-12), name


@pytest.mark.long
def test_a_replica_is_lost_between_phases_and_no_bit_differs(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [*GAN[:2], "steps=60", GAN[3], "callbacks=[]", "logger=[]", "numerics.reproducible=true"]
    common.append("checkpoint.every_steps=10")
    subprocess.run(quick.command(*common, "hydra.run.dir=alone"), check=True, stdout=subprocess.DEVNULL)
    starts = [f"index=1,phase=start,attempt={number},action=kill" for number in range(1, 9)]
    monkeypatch.setenv("TRAINKIT_FAIL", ";".join(["index=1,step=35,phase=backward,attempt=0,action=kill", *starts]))
    elastic = [*TWO, "elastic.min_replicas=1", "elastic.retry_s=600"]
    subprocess.run(
        quick.command(*common, *elastic, "hydra.run.dir=elastic"), check=True, capture_output=True, timeout=300
    )
    results = [json.loads(Path(folder, "result.json").read_text()) for folder in ("alone", "elastic")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    rows = [json.loads(line) for line in Path("elastic/metrics.jsonl").read_text().splitlines()]
    assert {row["replicas"] for row in rows if "replicas" in row} == {1, 2}
