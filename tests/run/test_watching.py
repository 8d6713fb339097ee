"""A rank that waits for the one that hangs, or for a processor, and is blamed instead is caught here alone.

Heartbeats are real files; the clock is not real.
A process that no parent watches and that hangs for ever is caught here alone.
A stack of a hanging process that is lost among those of its data loading processes is caught here alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo

from tests.end_to_end.hanging import loops_for_ever
from tests.support.present import present
from trainkit.cli import main
from trainkit.cluster.host import ThreadTimes, children_of, thread_times, waited_s
from trainkit.errors import HangError, TerminatedError
from trainkit.run.agent.failure import ProcessEvidence, facts_of, failure_of
from trainkit.run.agent.monitor import Monitor, TimeLimits, stopped_process
from trainkit.run.agent.self_watch import BeatCounter, SelfWatch
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import Heartbeat, HeartbeatReading, Pauses, read_heartbeat
from trainkit.run.process.worker_group import stacks_from
from trainkit.run.task import report_compiling
from trainkit.trainer.failpoints import PHASES, Phase


class Scene:
    """Ranks that beat when they are told, and a watch whose clock is moved by hand."""

    def __init__(
        self,
        path: Path,
        ranks: int = 2,
        auxiliary_ranks: tuple[int, ...] = (),
        *,
        sees_all: bool = True,
        **limits: float,
    ) -> None:
        self.now, self.ranks, self.folder = 0.0, range(ranks), RunFolder(path)
        self.hearts: dict[int, Heartbeat] = {}
        self.threads: dict[int, ThreadTimes] = {}
        self.stopped: set[int] = set()
        self.is_asked_to_stop = False
        self.monitor = Monitor(
            TimeLimits(**{"hang_timeout_s": 10.0, **limits}),
            self.folder,
            auxiliary_ranks=auxiliary_ranks,
            sees_all=sees_all,
            clock=lambda: self.now,
            pid_of=lambda rank: rank,
            threads=lambda _pid, _phase: dict(self.threads),
            stopped=lambda pid, _phase: 77 if pid in self.stopped else None,
            asked_to_stop=lambda: self.is_asked_to_stop,
        )

    def beat(self, *steps_and_phases: tuple[int, Phase], first: bool = False) -> Scene:
        for rank, (step, phase) in enumerate(steps_and_phases):
            heart = self.hearts.setdefault(rank, Heartbeat(self.folder.heartbeat_of(rank)))
            if not first:
                heart.beat(step - 1, "data")
            heart.beat(step, phase)
        return self

    def look(self, for_s: float) -> str | None:
        """Look every half second for so long; return the headline of the first failure."""
        until = self.now + for_s
        while self.now < until:
            self.now += 0.5
            overdue = self.monitor.look(self.ranks)
            if overdue is not None:
                evidence = ProcessEvidence(self.folder)
                facts = facts_of(evidence, running=self.ranks, reports={}, overdue=overdue)
                return failure_of(evidence, facts).headline
        return None


def test_of_ranks_that_wait_for_each_other_the_one_behind_is_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3).beat((3, "reduce"), (3, "forward"), (3, "reduce"))
    assert scene.look(60) == (
        "rank 1 has made no progress for 10 s in step 3 (forward). "
        "The limit is supervisor.hang_timeout_s=10: raise it if the rank was healthy."
    )
    assert 10 < scene.now < 12


def test_a_rank_that_waits_for_one_that_saves_is_not_blamed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, checkpoint_timeout_s=100.0).beat((3, "save"), (3, "reduce"))
    assert scene.look(90) is None
    assert present(scene.look(20)).startswith("rank 0 has made no progress for 100 s in step 3 (save). ")
    (tmp_path / "again").mkdir()
    again = Scene(tmp_path / "again").beat((3, "save"), (3, "reduce"))
    assert again.look(90) is None
    again.hearts[0].beat(3, "reduce")
    assert again.look(9) is None  # rank 1 has waited long, and gets its own time once the other has come


def test_a_rank_that_is_still_starting_is_named_while_the_other_waits_to_meet_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, start_timeout_s=20.0)
    scene.beat((0, "join"), first=True)
    assert present(scene.look(60)).startswith("rank 1 has made no progress for 20 s while starting. ")


def test_an_assistant_is_judged_by_itself_however_far_the_others_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, auxiliary_ranks=(1, 2))
    for step in range(4, 9):
        scene.beat((step, "update"), (20, "forward"), (step, "idle")) if step == 4 else scene.hearts[0].beat(
            step, "data"
        )
        if overdue := scene.look(4):
            break
    assert overdue is not None
    assert overdue.startswith("rank 1 has made no progress for 10 s in step 20 (forward).")


def test_a_rank_that_may_wait_for_one_of_another_host_has_the_longest_limit(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, sees_all=False, load_timeout_s=2000.0)
    assert scene.beat((3, "reduce")).look(600) is None
    assert scene.beat((4, "data")).look(12) is not None  # it reads samples alone


def test_the_first_step_has_a_limit_of_its_own(tmp_path: Path) -> None:
    scene = Scene(tmp_path, first_step_timeout_s=40.0).beat((0, "reduce"), (0, "backward"), first=True)
    assert present(scene.look(60)).startswith("rank 1 has made no progress for 40 s in step 0 (backward). ")


def test_time_in_which_the_supervisor_did_not_run_does_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path).beat((3, "forward"), (3, "forward"))
    assert scene.look(2) is None
    scene.now += 10_000
    assert scene.look(7) is None
    assert scene.look(3) is not None


def test_a_rank_that_only_waits_for_a_processor_is_not_hanging(tmp_path: Path) -> None:
    scene = Scene(tmp_path).beat((3, "forward"), (3, "forward"))
    scene.threads = {1: ThreadTimes(ran_s=1.0, waited_s=0.0, ready=True)}
    assert scene.look(600) is None
    scene.threads = {1: ThreadTimes(ran_s=1.0, waited_s=600.0, ready=False)}  # it sleeps from here on
    assert scene.look(15) is not None


def test_an_endless_loop_that_gets_half_a_processor_is_found_in_twice_the_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path).beat((3, "forward"), (3, "forward"))
    while (overdue := scene.look(1)) is None and scene.now < 60:
        scene.threads = {1: ThreadTimes(ran_s=scene.now / 2, waited_s=scene.now / 2, ready=True)}
    assert overdue is not None
    assert 18 <= scene.now <= 24


def test_a_thread_that_ran_or_slept_has_not_waited() -> None:
    idle, ran = ThreadTimes(1.0, 2.0, ready=False), ThreadTimes(5.0, 2.0, ready=True)
    assert waited_s({1: idle, 2: idle}, {1: idle, 2: ran, 3: ran}, 4.0) == 0.0
    assert waited_s({1: idle}, {1: ThreadTimes(1.0, 3.5, ready=True)}, 4.0) == 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_a_process_is_read_from_proc() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert child.pid in children_of(os.getpid())
        before, deadline = thread_times([child.pid]), time.monotonic() + 60
        while not (times := thread_times([child.pid]).get(child.pid)) or times.ran_s <= before[child.pid].ran_s:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert thread_times([child.pid]) == {}


@pytest.mark.parametrize("phase", ["start", "compile", "save", "idle"])
def test_a_stopped_process_has_the_limit_of_a_step_in_every_phase(tmp_path: Path, phase: Phase) -> None:
    scene = Scene(tmp_path).beat((5, "reduce"), (4, phase))
    scene.stopped = {1}
    assert scene.look(9) is None
    assert scene.look(3) == (
        f"rank 1 has made no progress for 10 s in step 4 ({phase}): pid 77, which reads its samples, is stopped by a "
        "signal (state T). To let it continue: kill -CONT 77. The limit is supervisor.hang_timeout_s=10: raise it if "
        "the rank was healthy."
    )


def test_time_before_a_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=1, eval_timeout_s=600).beat((3, "evaluate"))
    assert scene.look(300) is None
    for _ in range(3):
        scene.stopped = {0}
        assert scene.look(6) is None
        scene.stopped = set()
        assert scene.look(1) is None


def test_a_stopped_process_that_reads_samples_is_found_by_its_state() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as reader:
        try:
            assert stopped_process(os.getpid(), "data") is None
            os.kill(reader.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, reader.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped_process(os.getpid(), "data") == reader.pid
            assert stopped_process(os.getpid(), "forward") is None
        finally:
            reader.kill()


def test_a_rank_that_waits_for_data_is_ended_soon_after_a_request_to_stop(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ranks=1, first_step_timeout_s=1800).beat((0, "data"), first=True)
    assert scene.look(60) is None
    scene.is_asked_to_stop = True
    assert scene.look(4) is None
    assert scene.look(3) == "rank 0 has made no progress for 65 s in step 0 (data). It was asked to stop."


@pytest.mark.parametrize("phase", ["save", "reduce"])
def test_other_work_has_its_own_limit_after_a_request_to_stop(tmp_path: Path, phase: Phase) -> None:
    scene = Scene(tmp_path, ranks=1, hang_timeout_s=600).beat((4, phase))
    scene.is_asked_to_stop = True
    assert scene.look(60) is None


class Steps:
    """A rank on a clock of its own, and the limit of what it is doing."""

    def __init__(self) -> None:
        self.pauses, self.moment, self.step = Pauses(), 0.0, 0

    def beat(self, phase: Phase, lasts_s: float = 0.0) -> None:
        self.pauses.note(phase, self.step, moment=self.moment)
        self.moment += lasts_s

    def do(self, *seconds: float, shards: int = 1) -> Steps:
        for lasts_s in seconds:
            self.beat("data")
            for _ in range(shards):
                self.beat("forward", lasts_s / shards / 2)
                self.beat("backward", lasts_s / shards / 2)
            self.beat("reduce")
            self.beat("update")
            self.step += 1
        return self

    @property
    def limit_s(self) -> float:
        self.beat("data")
        return present(TimeLimits().limit_of(self.pulse("data"))).seconds

    def pulse(self, phase: Phase) -> HeartbeatReading:
        pauses = self.pauses
        return HeartbeatReading(
            moment=0.0, step=self.step, phase=phase, longest_s=pauses.longest_s, is_first=pauses.is_first
        )


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.001, 30), (1, 30), (5.9, 30), (60, 300), (600, 3000)])
def test_the_limit_of_a_step_follows_the_steps_from_30_s_on(step_s: float, limit_s: float) -> None:
    assert Steps().do(*[step_s] * 300).limit_s == pytest.approx(limit_s)


def test_a_first_step_is_no_measure_for_itself_and_none_after_two_minutes_of_steps_of_a_second() -> None:
    assert Steps().limit_s == 1800
    assert Steps().do(400).limit_s == 2000  # with nothing else to go by, the second may take as long as well
    steps = Steps().do(40, *[1] * 20)
    assert steps.limit_s == 200
    assert steps.do(*[1] * 100).limit_s == 30


def test_steps_that_grow_are_allowed_ten_times_the_last_ones() -> None:
    steps = Steps().do(*[1] * 200)
    for lasts_s in (4, 12, 40, 120, 300):
        assert lasts_s / 2 < steps.limit_s
        steps.do(*[lasts_s] * 3)
    assert steps.limit_s == 1500
    assert Steps().do(*[20] * 60, *[0.5] * 300).limit_s == 30  # steps that shrink bring it down


def test_accumulation_counts_by_shard() -> None:
    assert Steps().do(*[640] * 5, shards=64).limit_s == 50


def test_the_first_step_after_an_evaluation_is_a_first_step_once() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("evaluate", 50)
    assert steps.limit_s == 1800
    assert steps.do(45, 0.1).limit_s == 30  # no word about the steps that follow
    steps.do(*[0.1] * 2000).beat("evaluate", 50)
    assert steps.limit_s == pytest.approx(225)  # such a step took 45 s before


def test_a_save_changes_nothing_for_the_step_after_it() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("save", 50)
    assert steps.limit_s == 30  # a save alone allows the next step nothing
    steps.beat("evaluate", 50)
    steps.beat("save", 50)
    assert steps.limit_s == 1800


def test_compiling_in_the_middle_has_its_own_limit_and_teaches_nothing() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("forward")
    steps.beat("compile", 500)
    assert present(TimeLimits().limit_of(steps.pulse("compile"))).key == "supervisor.first_step_timeout_s"
    steps.beat("forward")
    assert steps.limit_s == 30


def test_orders_with_idle_times_between_them_are_steps_too_and_a_rollback_begins_anew() -> None:
    steps = Steps()
    for _ in range(130):
        steps.do(4).beat("idle", 100)
    assert steps.limit_s == 30  # 10 x 2 s; the idle times do not count
    steps.beat("load", 5)
    assert steps.limit_s == 1800  # it opens data again


@pytest.mark.parametrize(
    ("phases", "key"),
    [
        ((None, "start", "join"), "start_timeout_s=600"),
        (("load",), "load_timeout_s=1800"),
        (("callback", "evaluate"), "eval_timeout_s=600"),
        (("save", "end"), "checkpoint_timeout_s=1800"),
        (("compile",), "first_step_timeout_s=1800"),
    ],
)
def test_each_phase_names_its_key_and_the_remedy(phases: tuple[Phase | None, ...], key: str) -> None:
    for phase in phases:
        reading = None if phase is None else HeartbeatReading(moment=1.0, step=3, phase=phase)
        limit = present(TimeLimits().limit_of(reading))
        assert limit.remedy(limit.seconds + 1) == f"The limit is supervisor.{key}: raise it if the rank was healthy."


def test_the_remedy_names_the_automatic_limit_and_the_pauses_that_it_comes_from() -> None:
    pulse = HeartbeatReading(moment=1.0, step=3, phase="forward", longest_s=6.25)
    assert present(TimeLimits(hang_timeout_s=2).limit_of(pulse)).seconds == 2, "a number is taken as given"
    assert present(TimeLimits().limit_of(pulse)).remedy(63) == (
        "The limit is 62 s by supervisor.hang_timeout_s=auto, where recent steps paused for 6.2 s at most: "
        "set supervisor.hang_timeout_s to more than 63 if the rank was healthy."
    )
    assert TimeLimits().limit_of(HeartbeatReading(moment=1.0, step=3, phase="idle")) is None, "an idle rank may wait"


def test_a_beat_is_read_as_it_was_written_and_a_rank_beats_from_the_moment_it_starts(tmp_path: Path) -> None:
    with contextlib.closing(Heartbeat(tmp_path / "rank_0")) as heart:
        assert present(read_heartbeat(tmp_path / "rank_0")).phase == "start"
        for phase in PHASES:
            heart.beat(1 << 40, phase)
            pulse = present(read_heartbeat(tmp_path / "rank_0"))
            assert (pulse.step, pulse.phase) == (1 << 40, phase)
            assert 0 <= time.monotonic() - pulse.moment < 10
    (tmp_path / "rank_1").write_bytes(bytes(16))
    assert [read_heartbeat(tmp_path / f"rank_{rank}") for rank in (1, 2)] == [None, None]


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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # as in a job that was forked
    try:
        with SelfWatch(HASTY, folder, read=lambda _: beats.count()), pytest.raises(HangError):
            loops_for_ever()
        assert signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.slow
def test_a_pass_that_hangs_right_after_a_row_has_the_limit_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The callbacks of the row have the limit of an evaluation, 10 minutes by default."""
    overrides = ("--allow-package", "tests", "model={_target_: tests.end_to_end.hanging.Looping}")
    short = ("supervisor.hang_timeout_s=0.5", "log_every_steps=10", "logger=[]", "callbacks=[]")
    assert main(["recipe=digits", "steps=20", *overrides, *short, f"hydra.run.dir={tmp_path}/run"]) == 5
    assert "rank 0 has made no progress for" in (errors := capsys.readouterr().err)
    assert " in step 10. The limit is supervisor.hang_timeout_s=0.5" in errors


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
    assert beats.count().position == "step 8"  # it may be in any phase of the step


@pytest.mark.slow
def test_a_thread_that_does_not_take_the_interrupt_is_ended_with_its_process(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.path.mkdir()
    monkeypatch.setattr("trainkit.run.agent.self_watch._GRACE_S", 0.1)
    exited, beats = threading.Event(), beating(7, "data")
    watch = SelfWatch(
        HASTY, folder, read=lambda _: beats.count(), exit_process=lambda code: exited.set() if code == 5 else None
    )
    with watch:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # as code in C that does not return
        assert exited.wait(20)
        with pytest.raises(HangError):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert present(folder.read_result())["reason"].endswith(GIVEN)
    assert "test_watching.py" in capsys.readouterr().err  # the stack of the main thread


@pytest.mark.slow
def test_a_debugger_may_hold_the_process(folder: RunFolder) -> None:
    beats = beating(7, "data")
    code = compile("import time; time.sleep(1.5)", "/usr/lib/python3/bdb.py", "exec")
    with SelfWatch(HASTY, folder, read=lambda _: beats.count()):
        exec(code)
        time.sleep(0.2)  # the time in the debugger does not count once it is left
        beats("idle", 7)


@pytest.mark.slow
def test_a_wait_for_data_ends_when_asked_to_stop(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.agent.monitor._STOP_S", 0.2)
    beats = BeatCounter()
    beats("data", 0)
    watch = SelfWatch(TimeLimits(), folder, read=lambda _: beats.count(), requested=lambda: "preempted")
    with watch, pytest.raises(TerminatedError, match=r"in step 0\. It was asked to stop\.$"):
        time.sleep(60)


SCRIPT = """
import faulthandler, os, signal, sys, time
file = open(sys.argv[1], "wb")
faulthandler.register(signal.SIGUSR2, file=file)
def a_function_with_a_long_name(depth):
    if depth:
        return a_function_with_a_long_name(depth - 1)
    pids = [os.getpid()]
    for _ in range(3):
        if (pid := os.fork()) == 0:
            break
        pids.append(pid)
    else:
        print(*pids, flush=True)
    time.sleep(60)
a_function_with_a_long_name(60)
"""


def test_processes_that_share_a_file_do_not_mix_their_words(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            stacks = stacks_from(file, [partial(os.kill, pid, signal.SIGUSR2) for pid in pids])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    title, line = r"Current thread 0x\w+ \(most recent call first\):", r'  File "<string>", line \d+ in [a-z_<>]+'
    assert [text for text in stacks.splitlines() if not re.fullmatch(f"{title}|{line}", text)] == []
    assert stacks.count("in a_function_with_a_long_name\n") == 4 * 61
    assert stacks.count("<module>") == 4


@pytest.mark.slow
def test_a_process_that_cannot_be_asked_or_does_not_write_costs_no_answer_of_others(tmp_path: Path) -> None:
    file = tmp_path / "stacks"

    def has_ended() -> None:
        raise ProcessLookupError

    assert stacks_from(file, [has_ended]) == ""
    assert stacks_from(file, [has_ended, lambda: None, partial(file.write_text, "a stack\n")]) == "a stack"
