"""A progress line of another step, one that colours a pipe or is printed too often, and a remaining time that counts a
save beside an evaluation twice or a slow first step for ever are caught here alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.progress import PlainLine, Progress, TerminalLine
from trainkit.callbacks.screen.notebook import LiveHtml
from trainkit.callbacks.screen.pace import Interval, Pace, PauseSchedule
from trainkit.callbacks.screen.reading import Reading, plain_text

READING = Reading(
    step=1240,
    num_steps=5800,
    loss=0.1234567,
    metric=("val/accuracy", 0.9722),
    samples_per_s=412_345.0,
    data_wait=0.031,
    remaining_s=12.3,
)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_last_line_comes_once_with_its_evaluation_and_earlier_values_name_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_double(tmp_path, step=80, eval={"metric": "val/accuracy", "mode": "max"})
    progress = Progress(every_s=1e-9)
    progress.eval_end(run, {"step": 80, "val/loss": 9.0, "val/accuracy": 0.3})
    for step in (90, 100):
        run.state.step = step
        progress.log(run, row(step))
    progress.eval_end(run, {"step": 100, "val/loss": 9.0, "val/accuracy": 0.2})
    progress.run_end(run, {})
    assert [line.partition("  412 k")[0] for line in printed(capsys)] == [
        "step 80/100   80 %  val/accuracy 0.3000",
        "step 90/100   90 %  loss 0.5000  val/accuracy 0.3000 of step 80",
        "step 100/100  100 %  loss 0.5000  val/accuracy 0.2000",
    ]


def test_a_plain_line_shows_all_known_values_and_leaves_out_the_others() -> None:
    assert plain_text(READING) == (
        "step 1,240/5,800   21 %  loss 0.1235  val/accuracy 0.9722  412 k samples/s  data wait 3 %  0:12 left"
    )
    assert plain_text(Reading(step=1, num_steps=10)) == "step 1/10   10 %"
    speed = replace(READING, targets_per_s=512_000.0, mfu=0.41, memory=(3.0 * 2**30, 4.0 * 2**30), launches=312.0)
    assert plain_text(speed).endswith("512 k targets/s  MFU 41 %  3 GiB, peak 4 GiB  312 launches a step  0:12 left")


def test_plain_lines_come_every_few_seconds_and_the_last_always() -> None:
    now, stream = [0.0], io.StringIO()
    line = PlainLine(every_s=5.0, stream=stream, clock=lambda: now[0])
    for step in range(1, 10):
        now[0] = step * 2.0
        line.update(Reading(step=step, num_steps=9))
    line.close()
    line.close()
    shown = [text.split()[1] for text in stream.getvalue().splitlines()]
    assert shown == ["1/9", "4/9", "7/9", "9/9"]


def drawn() -> str:
    """What a terminal with colours is sent."""
    file = io.StringIO()
    console = Console(file=file, width=110, force_terminal=True, color_system="truecolor")
    line = TerminalLine(console=console, step_now=lambda: 1250)
    line.update(READING)
    line.close()
    return file.getvalue()


def test_the_bar_shows_the_step_of_this_moment_and_no_colours_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;m]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colour.search(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(drawn())
    assert "1,250/5,800  loss 0.1235" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn())


def test_a_notebook_gets_a_bar_whose_texts_are_no_html() -> None:
    reading = Reading(step=10, num_steps=20, loss=0.5, metric=("val/<b>acc", 0.9), remaining_s=75.0)
    html = LiveHtml(reading)._repr_html_()
    assert "<progress max='1' value='0.5000' aria-label='step 10 of 20'></progress>" in html
    assert "val/&lt;b&gt;acc 0.9000" in html
    assert "1:15 left" in html


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
        evaluations, saves = Interval(every_steps=evaluate_every), Interval(every_steps=save_every)
        assert PauseSchedule(last_step=1000, evaluations=evaluations, saves=saves, evaluated=1).due(1, 201) == due


def test_the_save_at_the_end_of_a_run_is_expected_too() -> None:
    pace = Pace(PauseSchedule(last_step=100, saves=Interval(every_steps=50)), begun=(0, 0.0, 0.0))
    pace.row(25, 25.0, now=25.0)
    pace.row(75, 75.0, now=78.0)  # a save of 3 s at step 50
    assert pace.remaining_s(now=78.0) == 25.0 + 3.0


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
