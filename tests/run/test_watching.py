"""Who is overdue, on a fake clock: pulses are real files, times are not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit.cluster.host import ThreadTimes, children_of, thread_times, waited_s
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.hang_detection import TimeLimits, Watch, stopped_process
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.supervisor.failure import hanging
from trainkit.trainer.failpoints import Phase


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
        self.watch = Watch(
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

    def beat(self, *steps_and_phases: tuple[int, Phase], first: bool = False) -> "Scene":
        for rank, (step, phase) in enumerate(steps_and_phases):
            heart = self.hearts.setdefault(rank, Heartbeat(self.folder.heartbeat_of(rank)))
            if not first:
                heart.beat(step - 1, "data")
            heart.beat(step, phase)
        return self

    def look(self, for_s: float) -> str | None:
        """Look each half second for so long; what is found first, as a person reads it."""
        until = self.now + for_s
        while self.now < until:
            self.now += 0.5
            found = self.watch.look(self.ranks)
            if found is not None:
                return hanging(self.folder, found, self.ranks).headline
        return None


def test_ranks_that_beat_do_not_hang(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in range(2, 9):
        assert scene.beat((step, "data"), (step, "reduce")).look(9) is None


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
    assert scene.look(20) == (
        "rank 0 has made no progress for 100 s in step 3 (save). "
        "The limit is supervisor.checkpoint_timeout_s=100: raise it if the rank was healthy."
    )


def test_a_rank_that_has_waited_long_gets_its_own_time_once_the_other_has_come(tmp_path: Path) -> None:
    scene = Scene(tmp_path).beat((3, "save"), (3, "reduce"))
    assert scene.look(90) is None
    scene.hearts[0].beat(3, "reduce")
    assert scene.look(9) is None


def test_a_rank_that_is_still_starting_is_named_while_the_other_waits_to_meet_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, start_timeout_s=20.0)
    scene.beat((0, "join"), first=True)
    assert scene.look(60) == (
        "rank 1 has made no progress for 20 s while starting. "
        "The limit is supervisor.start_timeout_s=20: raise it if the rank was healthy."
    )


def test_an_assistant_is_judged_by_itself_however_far_the_others_are(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, auxiliary_ranks=(1, 2))
    for step in range(4, 9):
        scene.beat((step, "update"), (20, "forward"), (step, "idle")) if step == 4 else scene.hearts[0].beat(
            step, "data"
        )
        if found := scene.look(4):
            break
    assert found is not None
    assert found.startswith("rank 1 has made no progress for 10 s in step 20 (forward).")


def test_a_rank_that_may_wait_for_one_of_another_host_has_the_longest_limit(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, sees_all=False, load_timeout_s=2000.0)
    assert scene.beat((3, "reduce")).look(600) is None
    assert scene.beat((4, "data")).look(12) is not None  # it reads samples alone


def test_the_first_step_has_a_limit_of_its_own(tmp_path: Path) -> None:
    scene = Scene(tmp_path, first_step_timeout_s=40.0).beat((0, "reduce"), (0, "backward"), first=True)
    assert scene.look(60) == (
        "rank 1 has made no progress for 40 s in step 0 (backward). "
        "The limit is supervisor.first_step_timeout_s=40: raise it if the rank was healthy."
    )


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
    while (found := scene.look(1)) is None and scene.now < 60:
        scene.threads = {1: ThreadTimes(ran_s=scene.now / 2, waited_s=scene.now / 2, ready=True)}
    assert found is not None
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
        while not (now := thread_times([child.pid]).get(child.pid)) or now.ran_s <= before[child.pid].ran_s:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert thread_times([child.pid]) == {}


@pytest.mark.parametrize("phase", ["start", "load", "compile", "evaluate", "save", "end", "idle"])
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


@pytest.mark.parametrize("phase", ["save", "compile", "callback", "reduce"])
def test_other_work_has_its_own_limit_after_a_request_to_stop(tmp_path: Path, phase: Phase) -> None:
    scene = Scene(tmp_path, ranks=1, hang_timeout_s=600).beat((4, phase))
    scene.is_asked_to_stop = True
    assert scene.look(60) is None
