import time
from pathlib import Path

import pytest

from tests.support.present import present
from trainkit.run.process.heartbeat import Heartbeat, read_heartbeat
from trainkit.trainer.failpoints import PHASES, Phase


@pytest.mark.parametrize("phase", PHASES)
def test_a_beat_is_read_as_it_was_written(tmp_path: Path, phase: Phase) -> None:
    heart = Heartbeat(tmp_path / "rank_0")
    heart.beat(1 << 40, phase)
    pulse = present(read_heartbeat(tmp_path / "rank_0"))
    assert (pulse.step, pulse.phase) == (1 << 40, phase)
    assert 0 <= time.monotonic() - pulse.moment < 1
    heart.close()


def test_a_rank_beats_from_the_moment_it_starts(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "rank_0").close()
    assert present(read_heartbeat(tmp_path / "rank_0")).phase == "start"


def test_no_file_and_an_empty_one_are_no_pulse(tmp_path: Path) -> None:
    (tmp_path / "rank_1").write_bytes(bytes(16))
    assert [read_heartbeat(tmp_path / f"rank_{rank}") for rank in (0, 1)] == [None, None]


def test_a_beat_costs_next_to_nothing(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "rank_0")
    begun = time.process_time()
    for step in range(10_000):
        heart.beat(step, "forward")
    assert (time.process_time() - begun) / 10_000 < 20e-6  # 1 microsecond of this processor
    heart.close()
