"""A checkpoint that is evaluated twice or never, or removed while it is evaluated, is caught here alone.
A run that never ends, or ends too early, because its evaluator died or is slow is caught here alone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support import quick
from tests.support.present import present
from tests.support.refusing import refused
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.schema import load_resolved
from trainkit.data.sets.images import Digits
from trainkit.errors import DataError, StopKind
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.session import evaluator_main as evaluator
from trainkit.run.session.auxiliary import (
    CheckpointEvaluator,
    EvaluatorEnd,
    await_evaluator,
    bring_up_to_date,
    describe,
    evaluate_checkpoints,
    report_end,
)
from trainkit.trainer.manifest import EvaluatedIndex, Retention, list_complete, manifest_bytes, owner_of

OVERRIDES = [
    "recipe=null", "steps=12", "batch.global_size=64", "model.hidden=[8]", "eval.every_steps=4",
    "eval.metric=val/accuracy", "checkpoint.every_steps=4", "checkpoint.every_epochs=null",
    "checkpoint.keep_last=99", "callbacks=[]", "logger=[]", "quiet=true",
]  # fmt: skip
EVALUATOR = Identity(task=Task(role="evaluator", index=0, rank=1), num_ranks=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluated at each checkpoint itself."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainkit.train(trainkit.compose(OVERRIDES), run_dir=folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    """A copy of it, whose checkpoints have not been judged."""
    shutil.copytree(trained, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "index.json").unlink()
    return folder


def planned(folder: RunFolder, **checkpoint: Any) -> RunPlan:
    cfg = load_resolved(folder.resolved)
    return make_plan(replace(cfg, checkpoint=replace(cfg.checkpoint, **checkpoint)))


def evaluate(folder: RunFolder, requested: Callable[[], StopKind | None] = lambda: None) -> None:
    evaluate_checkpoints(planned(folder), EVALUATOR, folder, requested=requested, on_phase=lambda phase, step: None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_checkpoint_gets_the_figures_that_the_training_found(run: RunFolder) -> None:
    evaluate(run)
    accuracies = {row["step"]: row["val/accuracy"] for row in rows(run.metrics) if "val/accuracy" in row}
    assert {row["step"]: row["val/accuracy"] for row in rows(run.evaluations)} == accuracies
    assert sorted(accuracies) == [4, 8, 12]


def test_what_was_done_in_an_earlier_life_is_not_done_again(run: RunFolder) -> None:
    first = CheckpointEvaluator(planned(run), run, device="cpu", on_phase=lambda phase, step: None)
    assert present(first.evaluate_next())["step"] == 4
    first.close()
    evaluate(run)
    evaluate(run)
    assert [row["step"] for row in rows(run.evaluations)] == [4, 8, 12]


def forget_metrics(folder: RunFolder) -> None:
    for checkpoint in list_complete(folder.checkpoints):
        (checkpoint.folder / "manifest.json").write_bytes(manifest_bytes(replace(checkpoint, metric=None)))


def test_it_names_the_best_where_the_training_knew_no_metric(run: RunFolder) -> None:
    forget_metrics(run)
    evaluate(run)
    best = max(rows(run.evaluations), key=lambda row: (row["val/accuracy"], -row["step"]))
    names = json.loads((run.checkpoints / "index.json").read_text())
    assert names == {"last": "step_00000012", "best": best["checkpoint"]}


def test_the_best_evaluated_checkpoint_and_the_one_that_is_being_evaluated_are_kept(run: RunFolder) -> None:
    forget_metrics(run)
    metrics = {"step_00000004": 0.9, "step_00000008": 0.5}
    EvaluatedIndex(metrics=metrics, evaluating="step_00000008").write(run.checkpoints)
    Retention(keep_last=1, keep_best=1, mode="max").apply(run.checkpoints, step=12, owner=owner_of(run.checkpoints))
    assert [checkpoint.step for checkpoint in list_complete(run.checkpoints)] == [12, 8, 4]
    EvaluatedIndex(metrics=metrics).write(run.checkpoints)
    Retention(keep_last=1, keep_best=1, mode="max").apply(run.checkpoints, step=12, owner=owner_of(run.checkpoints))
    assert [checkpoint.step for checkpoint in list_complete(run.checkpoints)] == [12, 4]


def test_a_damaged_checkpoint_is_named_and_left_out(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.checkpoints / "step_00000008" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    evaluate(run)
    assert [row["step"] for row in rows(run.evaluations)] == [4, 12]
    assert "step_00000008 is skipped: checkpoint" in capsys.readouterr().out


def test_it_waits_for_checkpoints_until_there_is_a_result(run: RunFolder) -> None:
    result = run.read_result()
    run.result.unlink()
    polls = iter(range(6))

    def requested() -> None:
        if next(polls, "over") == "over":
            run.write_result(present(result))

    evaluate(run, requested)
    assert len(rows(run.evaluations)) == 3


def test_any_run_folder_can_be_evaluated_by_hand(run: RunFolder, tmp_path: Path) -> None:
    assert evaluator.main([str(run.path), "/cpu:0"]) == 0
    epochs = [row["epoch"] for row in rows(run.evaluations)]
    assert epochs == pytest.approx([256 / 1437, 512 / 1437, 768 / 1437], abs=1e-5)
    (events,) = run.tensorboard.glob("events.out.tfevents.*")
    assert events.name.endswith(".evaluator")
    assert b"val/accuracy" in events.read_bytes()
    assert evaluator.main([str(tmp_path)]) == 2, "a folder without a run"


@pytest.mark.long
def test_the_evaluator_does_not_wait_for_a_run_without_a_process(run: RunFolder) -> None:
    run.result.unlink()
    (run.path / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    assert evaluator.main([str(run.path)]) == 0
    assert len(rows(run.evaluations)) == 3


BESIDE = ["recipe=null", "strategy=parameter_server", "strategy.evaluator=true"]


@pytest.mark.parametrize(
    ("splits", "keys", "expected"),
    [
        (None, ["callbacks=[early_stop]"], "callbacks.early_stop: needs evaluations during the training"),
        ({"train": Digits(split="train")}, [], "strategy.evaluator: has no validation split to evaluate on"),
    ],
)
def test_an_evaluator_with_nothing_to_do_is_refused(
    splits: Mapping[str, Any] | None, keys: list[str], expected: str
) -> None:
    (problem,) = refused(make_plan, trainkit.compose([*BESIDE, *keys]).cfg, splits=splits)
    assert problem.startswith(expected)


@pytest.fixture
def folder(folder: RunFolder) -> RunFolder:
    folder.live.mkdir(parents=True)
    return folder


class Clock:
    """Seconds that pass while the run waits; at some of them something happens."""

    def __init__(self, **happens: Callable[[], object]) -> None:
        self.now, self.happens = 0.0, happens

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1 + 0 * seconds
        self.happens.get(f"at_{self.now:g}", lambda: None)()


def awaited(
    folder: RunFolder, clock: Clock, *, limit_s: float = 1000.0, requested: Callable[[], StopKind | None] = lambda: None
) -> EvaluatorEnd:
    return await_evaluator(folder, 2, limit_s=limit_s, requested=requested, clock=clock, sleep=clock.sleep)


def test_the_result_waits_until_the_evaluator_is_done(folder: RunFolder) -> None:
    clock = Clock(at_9=lambda: report_end(folder, EvaluatorEnd(status="finished")))
    assert awaited(folder, clock) == EvaluatorEnd(status="finished")
    assert (clock.now, folder.trained.exists()) == (9, True)


def test_it_waits_as_long_as_checkpoints_are_evaluated_in_time(folder: RunFolder) -> None:
    seconds = (90, 180, 270)
    rows = {f"at_{second}": lambda second=second: folder.evaluations.write_text("r" * second) for second in seconds}
    end = awaited(folder, clock := Clock(**rows), limit_s=100)
    reason = "no checkpoint was evaluated in 100 s (supervisor.evaluator_timeout_s)"
    assert end == EvaluatorEnd(status="timed out", reason=reason)
    assert clock.now == 270 + 101


def test_an_evaluator_that_reported_an_error_has_30_s_to_come_again(folder: RunFolder) -> None:
    write_error_report(folder.error_of(2), 2, DataError("no such file"))
    end = awaited(folder, clock := Clock())
    assert end == EvaluatorEnd(status="failed", reason="DataError: no such file")
    assert clock.now == 31


def test_an_evaluator_without_a_sign_of_life_is_not_waited_for_to_the_limit(folder: RunFolder) -> None:
    heart = Heartbeat(folder.heartbeat_of(2))
    end = awaited(folder, clock := Clock(at_200=lambda: heart.beat(3, "evaluate")))
    heart.close()
    assert end == EvaluatorEnd(status="failed", reason="it sent no heartbeat for 300 s")
    assert clock.now == 200 + 301


def test_a_stop_ends_the_wait(folder: RunFolder) -> None:
    clock = Clock()
    end = awaited(folder, clock, requested=lambda: "stopped" if clock.now >= 5 else None)
    assert end == EvaluatorEnd(status="stopped", reason="the run was asked to end")
    assert clock.now == 5
    row = describe(folder, end)
    assert row == {"status": "finished", "reason": None, "evaluated": 0, "not_evaluated": []}, "nothing was left to do"


def test_a_result_that_did_not_wait_is_brought_up_to_date(folder: RunFolder) -> None:
    folder.write_result({"status": "finished", "best": None, "steps": 9})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "index.json").write_text('{"best": "step_00000004", "last": null}')
    assert bring_up_to_date(folder)
    result = present(folder.read_result())
    assert (result["best"], result["steps"]) == (f"{folder.checkpoints}/step_00000004", 9)
    assert result["evaluator"]["status"] == "finished"


def test_the_result_of_a_run_that_goes_on_is_left_alone(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.session.auxiliary._LOCKED_S", 0.0)
    folder.write_result({"status": "stopped"})
    with folder.lock():
        assert not bring_up_to_date(folder)
    folder.result.unlink()
    assert not bring_up_to_date(folder)
    assert not folder.result.exists()


RUN = [
    "recipe=null", "strategy=parameter_server", "strategy.workers=1", "strategy.evaluator=true", "steps=40",
    "batch.global_size=64", "model.hidden=[8]", "checkpoint.every_steps=10", "checkpoint.keep_last=99",
    "eval.every_epochs=null", "eval.metric=val/loss", "eval.mode=max", "callbacks=[]", "logger=[]",
]  # fmt: skip


def finished(folder: RunFolder, fail: str, *overrides: str) -> tuple[dict[str, Any], str]:
    """Train with a planted failure of the evaluator; the first checkpoint is the best. Returns result and screen."""
    command = quick.command(*RUN, f"hydra.run.dir={folder.path}", *overrides)
    environ = os.environ | {"TRAINKIT_FAIL": f"rank=2,phase=evaluate,{fail}"}
    done = subprocess.run(command, cwd=folder.path.parent, env=environ, capture_output=True, text=True, check=True)
    return present(folder.read_result()), done.stdout


def test_an_evaluator_that_is_killed_and_comes_again_names_the_best_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result, screen = finished(folder, "step=10,life=0,action=kill")
    assert result["best"] == f"{folder.path}/checkpoints/step_00000010"
    assert result["evaluator"] == {"status": "finished", "reason": None, "evaluated": 4, "not_evaluated": []}
    assert [(row["kind"], row["task"], row["step"]) for row in result["restarts"]] == [("alone", "evaluator:0", 10)]
    assert "/checkpoints/step_00000010\n" in screen[screen.index("  best ") :]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fail", "overrides", "status", "reason"),
    [
        ("action=hang", ["supervisor.evaluator_timeout_s=2"], "timed out", "no checkpoint was evaluated in 2 s"),
        ("action=kill", ["supervisor.max_restarts=0"], "failed", "Evaluation gave up after 0 restarts"),
        ("action=raise", [], "failed", "evaluator:0 raised the same exception twice in the same place"),
    ],
)
def test_an_evaluator_that_fails_is_named(
    tmp_path: Path, fail: str, overrides: list[str], status: str, reason: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    result, screen = finished(folder, f"step=40,{fail}", *overrides)
    assert result["status"] == "finished"
    assert (result["evaluator"]["status"], reason in result["evaluator"]["reason"]) == (status, True)
    assert result["evaluator"]["not_evaluated"] == ["step_00000040"]
    assert result["best"] == f"{folder.path}/checkpoints/step_00000010"
    assert f"  {status}: " in screen[screen.index("  evaluator ") :]
