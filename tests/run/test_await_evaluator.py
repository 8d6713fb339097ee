"""A run that never ends, or ends too early, because its evaluator died or is slow is caught here alone."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import quick
from tests.support.present import present
from trainkit.errors import DataError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.session.await_evaluator import await_evaluator, bring_up_to_date, describe
from trainkit.run.session.evaluator_end import EvaluatorEnd, report_end


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
    folder: RunFolder, clock: Clock, *, limit_s: float = 1000.0, requested: Callable[[], str | None] = lambda: None
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
    answers = itertools.chain([None] * 5, itertools.repeat("stopped"))
    end = awaited(folder, clock := Clock(), requested=lambda: next(answers))
    assert end == EvaluatorEnd(status="stopped", reason="the run was asked to end")
    assert clock.now == 5
    told = describe(folder, end)
    assert told == {"status": "finished", "reason": None, "evaluated": 0, "not_evaluated": []}, "nothing was left to do"


def test_a_result_that_did_not_wait_is_brought_up_to_date(folder: RunFolder) -> None:
    folder.write_result({"status": "finished", "best": None, "steps": 9})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "index.json").write_text('{"best": "step_00000004", "last": null}')
    assert bring_up_to_date(folder)
    result = present(folder.read_result())
    assert (result["best"], result["steps"]) == (f"{folder.checkpoints}/step_00000004", 9)
    assert result["evaluator"]["status"] == "finished"


def test_the_result_of_a_run_that_goes_on_is_left_alone(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.session.await_evaluator._LOCKED_S", 0.0)
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
    assert [(one["kind"], one["task"], one["step"]) for one in result["restarts"]] == [("alone", "evaluator:0", 10)]
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
