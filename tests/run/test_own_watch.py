"""A process that no parent watches and that hangs for ever is caught here alone."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo

from tests.end_to_end.hanging import loops_for_ever
from tests.support.present import present
from trainkit.cli import main
from trainkit.errors import HangError, TerminatedError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import TimeLimits
from trainkit.run.supervisor.self_watch import BeatCounter, SelfWatch
from trainkit.run.task import report_compiling

HASTY = TimeLimits(hang_timeout_s=0.4, start_timeout_s=0.4, eval_timeout_s=0.4)
GIVEN = "The limit is supervisor.hang_timeout_s=0.4: raise it if the rank was healthy."


def beating(step: int, phase: str) -> BeatCounter:
    beats = BeatCounter()
    beats("data", step - 1)
    beats(phase, step)
    return beats


@pytest.mark.slow
def test_a_sleep_and_a_loop_without_an_end_are_interrupted(folder: RunFolder) -> None:
    beats = beating(7, "data")
    with SelfWatch(HASTY, folder, read=lambda _: beats.count()), pytest.raises(HangError) as caught:
        time.sleep(60)
    assert str(caught.value) == f"rank 0 has made no progress for 0 s in step 7. {GIVEN}"
    beats = beating(7, "data")
    with SelfWatch(HASTY, folder, read=lambda _: beats.count()), pytest.raises(HangError):
        loops_for_ever()


@pytest.mark.slow
def test_a_pass_that_hangs_right_after_a_row_has_the_limit_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The callbacks of the row have the limit of an evaluation, 10 minutes by default."""
    own = ("--allow-package", "tests", "model={_target_: tests.end_to_end.hanging.Looping}")
    short = ("supervisor.hang_timeout_s=0.5", "log_every_steps=10", "logger=[]", "callbacks=[]")
    assert main(["recipe=digits", "steps=20", *own, *short, f"hydra.run.dir={tmp_path}/run"]) == 5
    assert "rank 0 has made no progress for" in (said := capsys.readouterr().err)
    assert " in step 10. The limit is supervisor.hang_timeout_s=0.5" in said


@pytest.mark.slow
def test_steps_are_counted_from_aside(folder: RunFolder) -> None:
    beats, step = beating(7, "data"), [7]
    beats.follow(lambda: step[0])
    with SelfWatch(HASTY, folder, read=lambda _: beats.count()):
        for step[0] in range(8, 16):
            time.sleep(0.1)
    assert (beats.step, beats.phase) == (15, "data")


def test_a_step_that_is_counted_hides_neither_an_evaluation_nor_a_compilation() -> None:
    """A later step may compile for minutes, as a ragged last batch does: `first_step_timeout_s` limits it."""
    beats = beating(7, "evaluate")
    beats.follow(lambda: 7)
    assert beats.count().phase == "evaluate"
    beats = beating(0, "data")
    beats.follow(lambda: 7)
    phases = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        phases.append((beats.count().phase, beats.count().step))
        return graph.forward

    with report_compiling(beats):
        torch.compile(lambda tensor: tensor + 1, backend=backend)(torch.ones(2))
    assert phases == [("compile", 7)]
    assert (beats.phase, beats.step) == ("data", 7)
    beats.follow(lambda: 8)
    assert (beats.count().phase, beats.count().step) == ("data", 8)
    assert beats.count().place == "step 8"  # it may be in any phase of the step


@pytest.mark.slow
def test_a_thread_that_does_not_take_the_interrupt_is_ended_with_its_process(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.path.mkdir()
    monkeypatch.setattr("trainkit.run.supervisor.self_watch._GRACE_S", 0.1)
    left, beats = threading.Event(), beating(7, "data")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # as code in C that does not return
    watch = SelfWatch(
        HASTY, folder, read=lambda _: beats.count(), exit_process=lambda code: left.set() if code == 5 else None
    )
    with watch:
        assert left.wait(20)
        with pytest.raises(HangError):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert present(folder.read_result())["reason"].endswith(GIVEN)
    assert "test_own_watch.py" in capsys.readouterr().err  # the stack of the main thread


@pytest.mark.slow
def test_a_debugger_may_hold_the_process(folder: RunFolder) -> None:
    beats = beating(7, "data")
    held = compile("import time; time.sleep(1.5)", "/usr/lib/python3/bdb.py", "exec")
    with SelfWatch(HASTY, folder, read=lambda _: beats.count()):
        exec(held)
        time.sleep(0.2)  # the time in the debugger does not count once it is left
        beats("idle", 7)


@pytest.mark.slow
def test_a_wait_for_data_ends_when_asked_to_stop(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.hang_detection._STOP_S", 0.2)
    beats = BeatCounter()
    beats("data", 0)
    watch = SelfWatch(TimeLimits(), folder, read=lambda _: beats.count(), requested=lambda: "preempted")
    with watch, pytest.raises(TerminatedError, match=r"in step 0\. It was asked to stop\.$"):
        time.sleep(60)
