import time

import pytest

from trainkit.engine.failpoints import PHASES
from trainkit.run.failure import hung
from trainkit.run.folder import RunFolder
from trainkit.run.heartbeat import Heartbeat, read_pulse


@pytest.mark.parametrize("phase", PHASES)
def test_a_beat_is_read_as_it_was_written(tmp_path, phase):
    heart = Heartbeat(tmp_path / "rank_0")
    heart.beat(1 << 40, phase)
    pulse = read_pulse(tmp_path / "rank_0")
    assert (pulse.step, pulse.phase) == (1 << 40, phase)
    assert 0 <= time.monotonic() - pulse.moment < 1
    heart.close()


def test_a_rank_beats_from_the_moment_it_starts(tmp_path):
    Heartbeat(tmp_path / "rank_0").close()
    assert read_pulse(tmp_path / "rank_0").phase == "start"


def test_no_file_and_an_empty_one_are_no_pulse(tmp_path):
    (tmp_path / "rank_1").write_bytes(bytes(16))
    assert [read_pulse(tmp_path / f"rank_{rank}") for rank in (0, 1)] == [None, None]


def beats(tmp_path, *steps_and_phases):
    folder = RunFolder(tmp_path)
    for rank, (step, phase) in enumerate(steps_and_phases):
        heart = Heartbeat(folder.heartbeat_of(rank))
        heart.beat(step, phase)
        heart.close()
    return folder


def look(folder, ranks, after_s, timeout_s=10.0):
    now = time.monotonic()
    return hung(folder, ranks, now=now + after_s, started=now, timeout_s=timeout_s)


def test_ranks_that_beat_do_not_hang(tmp_path):
    assert look(beats(tmp_path, (3, "data"), (3, "reduce")), [0, 1], after_s=9) is None


def test_of_ranks_that_wait_for_each_other_the_one_behind_is_named(tmp_path):
    folder = beats(tmp_path, (3, "reduce"), (3, "forward"), (3, "reduce"))
    assert look(folder, [0, 1, 2], after_s=12).headline == (
        "rank 1 has made no progress for 12 s in step 3 (forward) (supervisor.hang_timeout_s=10)."
    )


def test_a_rank_that_never_came_to_its_first_beat_is_named(tmp_path):
    folder = beats(tmp_path, (0, "start"))
    assert look(folder, [0, 1], after_s=11).headline == (
        "rank 1 has made no progress for 11 s while starting (supervisor.hang_timeout_s=10)."
    )


def test_a_beat_costs_next_to_nothing(tmp_path):
    heart = Heartbeat(tmp_path / "rank_0")
    begun = time.perf_counter()
    for step in range(10_000):
        heart.beat(step, "forward")
    assert (time.perf_counter() - begun) / 10_000 < 20e-6  # 0.5 microseconds here; room for a busy machine
    heart.close()
