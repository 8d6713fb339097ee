from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.callbacks.run_double import run_double
from trainkit.callbacks.profiler import Profiler
from trainkit.strategies.base import Status, StepOutcome


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
