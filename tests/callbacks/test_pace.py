"""A remaining time that counts a save together with an evaluation twice, or a slow first step for ever, is caught here
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.progress import Progress
from trainkit.callbacks.screen.pace import Interval, Pace, PauseSchedule

STEPS, STEP_S, FIRST_S, ROW_EVERY = 1000, 0.05, 4.0, 10
LATER_S = 1.0
"""Seconds that the training loses in its second row."""


def estimate_over_truth(pauses: PauseSchedule, costs: Mapping[str, float]) -> float:
    """Play a run on a clock of its own; return the estimate after a tenth of it over what then remained."""
    now = seconds = 0.0
    pace, estimate, estimated_at = Pace(pauses, begun=(0, 0.0, 0.0)), math.nan, 0.0
    for step in range(1, STEPS + 1):
        took = FIRST_S if step == 1 else STEP_S + LATER_S * (step == 15)
        now, seconds = now + took, seconds + took
        if step % ROW_EVERY == 0:
            pace.row(step, seconds, now=now)
            if step == STEPS // 10:
                estimate, estimated_at = pace.remaining_s(now=now), now
        now += costs["plan"] * (step == 20)
        if step < STEPS:
            now += costs["evaluation"] * pauses.evaluations.count(step, step + 1)
            now += costs["save"] * pauses.saves.count(step, step + 1)
    now += costs["evaluation"] * pauses.evaluated_at_end / max(pauses.evaluated, 1) + costs["save"]
    return estimate / (now - estimated_at)


@pytest.mark.parametrize(("evaluate_every", "save_every"), [(40, 25), (80, 20), (100, None), (250, 50), (None, 50)])
def test_after_a_tenth_of_a_run_with_pauses_the_remaining_time_is_known_within_a_tenth(
    evaluate_every: int | None, save_every: int | None
) -> None:
    evaluated = 600 if evaluate_every else 0
    pauses = PauseSchedule(
        last_step=STEPS,
        evaluations=Interval(every_steps=evaluate_every),
        saves=Interval(every_steps=save_every),
        samples_per_step=10,
        evaluated=evaluated,
        evaluated_at_end=evaluated,
    )
    costs = {"evaluation": 1.1 if evaluated else 0.0, "save": 0.3 if save_every else 0.0, "plan": 2.0}
    assert estimate_over_truth(pauses, costs) == pytest.approx(1.0, abs=0.1)


def test_a_save_at_the_step_of_an_evaluation_is_no_pause_of_its_own() -> None:
    for evaluate_every, save_every, due in ((40, 25, (5, 8 - 1)), (20, 40, (10, 0)), (50, 30, (4, 6 - 1))):
        pauses = PauseSchedule(
            last_step=1000, evaluations=Interval(every_steps=evaluate_every), saves=Interval(every_steps=save_every),
            evaluated=100,
        )  # fmt: skip
        assert pauses.due(1, 201) == due


def test_a_slow_start_is_forgotten_after_a_minute_and_a_finished_run_has_nothing_left() -> None:
    pace = Pace(PauseSchedule(last_step=10_000), begun=(0, 0.0, 0.0))
    pace.row(1, 100.0, now=100.0)
    for second in range(101, 201):
        pace.row(1 + 10 * (second - 100), float(second), now=float(second))
    assert pace.remaining_s(now=200.0) == pytest.approx((10_000 - 1001) / 10)
    assert Pace(PauseSchedule(last_step=7), begun=(7, 1.0, 0.0)).remaining_s(now=5.0) == 0.0


def test_the_pauses_are_those_of_the_config(tmp_path: Path) -> None:
    kept: dict[str, Any] = {
        "eval": {"every_steps": 20, "every_epochs": 0.5},
        "checkpoint": {"every_epochs": 1, "every_s": None},
    }
    run = run_double(tmp_path, stop_at_step=40, **kept)
    run.datasets = {"train": range(1000), "val": range(300), "test": range(100)}
    pauses = PauseSchedule.of(run)
    assert (pauses.last_step, pauses.evaluated, pauses.evaluated_at_end, pauses.saves_every_s) == (40, 300, 400, None)
    assert pauses.due(1, 101) == (5 + 2, 1)
    run.cfg = replace(run.cfg, eval=replace(run.cfg.eval, beside=True))  # an evaluator beside the training
    assert (PauseSchedule.of(run).evaluated, PauseSchedule.of(run).evaluated_at_end) == (0, 0)


def test_the_line_counts_down_through_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("trainkit.callbacks.progress.time.monotonic", lambda: now[0])
    run, progress = run_double(tmp_path), Progress(every_s=1e-9)
    run.begun_moment = 0.0
    now[0] = 1.0
    run.state.step = 10
    progress.log(run, row(10))  # 10 steps in a second, as the row says: 9 s for the other 90
    now[0] = 3.0
    progress.eval_end(run, {"val/loss": 1.0})
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == ["0:09 left", "0:07 left"]


def test_a_row_costs_the_same_for_any_number_of_steps() -> None:
    pauses = PauseSchedule(last_step=10**12, evaluations=Interval(every_steps=1), evaluated=1)
    assert pauses.due(0, 10**12)[0] == 10**12 - 1
