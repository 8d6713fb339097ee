from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.callbacks.run_double import run_double
from trainkit.callbacks import profiler as profiling
from trainkit.callbacks.profiler import Profiler
from trainkit.strategies.base import Status, StepOutcome
from trainkit.trainer import phase_clock
from trainkit.trainer.phase_clock import PhaseClock


def profiled(folder: Path, *, until: int, **settings: Any) -> Path:
    run, profiler = run_double(folder), Profiler(**settings)
    profiler.run_start(run)
    for step in range(1, until + 1):
        torch.zeros(step).cumsum(0)
        run.state.step = step
        profiler.step_end(run, StepOutcome(step=step, status=Status.applied, loss_sum=None, weight=0.0))
    profiler.run_end(run, {})
    return folder / "profile"


def test_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    folder = profiled(tmp_path, until=9, skip_steps=2, num_steps=3)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 3
    assert "aten::cumsum" in (folder / "operations.txt").read_text()


def test_a_run_that_ends_within_the_recording_keeps_it(tmp_path: Path) -> None:
    assert sorted(path.name for path in profiled(tmp_path, until=3, skip_steps=2, num_steps=30).iterdir()) == [
        "bottleneck.json",
        "operations.txt",
        "trace.json",
    ]


def test_a_run_that_ends_before_the_recording_leaves_nothing(tmp_path: Path) -> None:
    assert not profiled(tmp_path, until=3, skip_steps=10).exists()


def test_on_a_gpu_the_steps_are_timed_together_and_a_step_takes_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = iter([10.0, 16.0, 17.0]), list[torch.device]()
    monkeypatch.setattr(profiling, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(profiling, "wait_for", waits.append)
    monkeypatch.setattr(PhaseClock, "begin", lambda *_: None)
    monkeypatch.setattr(PhaseClock, "lap", lambda _: {"input": 0.3, "exchange": 0.6})
    run, profiler = run_double(tmp_path, is_owner=False), Profiler(skip_steps=4, num_steps=9)
    run.device = torch.device("cuda", 1)
    profiler.run_start(run)
    for step in range(1, 6):
        run.state.step = step
        profiler.step_end(run, StepOutcome(step=step, status=Status.applied, loss_sum=None, weight=0.0))
    found = json.loads((tmp_path / "profile" / "rank_0.json").read_text())
    assert found == {"steps": [2.0], "inputs": [pytest.approx(0.1)], "exchanges": [pytest.approx(0.2)]}
    assert waits == [run.device] * 2


def test_the_parts_of_two_threads_add_up_to_the_time_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread computes; the other makes the update of another worker's gradient meanwhile."""
    times = iter(range(100))
    monkeypatch.setattr(phase_clock, "perf_counter", lambda: float(next(times)))
    clock = PhaseClock()
    clock.begin(torch.device("cpu"))

    def update() -> None:
        clock("update", 0)
        clock.end_step()

    updated = Thread(target=update)
    clock("forward", 0)
    updated.start()
    updated.join()
    clock("backward", 0)
    clock("reduce", 0)
    clock.end_step()
    assert clock.lap() == {"input": 0.0, "forward": 2.0, "backward": 1.0, "exchange": 1.0, "update": 1.0}
