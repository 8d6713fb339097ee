from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.run_double import run_double
from trainkit.callbacks.early_stop import EarlyStop
from trainkit.errors import ConfigError


def reason_after(
    values: Iterable[float],
    *,
    metric: str | None = "val/accuracy",
    mode: str | None = "max",
    stop: EarlyStop | None = None,
    folder: Path = Path(),
    **settings: Any,
) -> str | None:
    run = run_double(folder, eval={"metric": metric, "mode": mode, "every_steps": 1, "every_epochs": None})
    stop = stop or EarlyStop(**settings)
    for value in values:
        run.state.step = stop.state()["counted"] + 1
        stop.eval_end(run, {"step": 10.0, "val/loss": 9.0, metric or "val/loss": value})
    return run.stop_reason


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"patience": 2}, False),
        ([0.4, 0.3, 0.4], {"patience": 2}, True),
        ([0.4, 0.3, 0.5, 0.4], {"patience": 2}, False),
        ([0.4, 0.45, 0.5], {"patience": 2, "min_delta": 0.1}, True),
        ([0.4, math.nan, math.nan], {"patience": 2}, True),
        ([math.nan, 0.1], {"patience": 2}, False),
    ],
)
def test_a_run_ends_when_its_metric_stands_still(
    tmp_path: Path, values: list[float], settings: dict[str, int] | dict[str, float], stops: bool
) -> None:
    reason = reason_after(values, folder=tmp_path, **settings)
    assert reason == ("val/accuracy has not improved for 2 evaluations" if stops else None)


def test_less_is_better_without_a_choice(tmp_path: Path) -> None:
    assert reason_after([0.5, 0.4], metric=None, mode=None, folder=tmp_path, patience=1) is None
    assert (
        reason_after([0.5, 0.6], metric=None, mode=None, folder=tmp_path, patience=1)
        == "val/loss has not improved for 1 evaluation"
    )


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    first = EarlyStop(patience=3)
    reason_after([0.5, 0.4, 0.4], folder=tmp_path, stop=first)
    assert first.state() == {"best": 0.5, "waited": 2, "counted": 3}
    second = EarlyStop(patience=3)
    second.restore(first.state())
    assert reason_after([0.5], folder=tmp_path, stop=second) == "val/accuracy has not improved for 3 evaluations"


def test_the_evaluation_of_a_run_that_is_stopped_between_two_others_does_not_count(tmp_path: Path) -> None:
    run = run_double(tmp_path, eval={"every_steps": 10, "every_epochs": None})
    stop = EarlyStop(patience=1)
    for step, loss in ((10, 0.5), (14, 0.6), (20, 0.4)):  # stop_at_step=14, then a resume
        run.state.step = step
        stop.eval_end(run, {"val/loss": loss})
    assert (run.stop_reason, stop.state()) == (None, {"best": 0.4, "waited": 0, "counted": 20})


def test_the_evaluation_of_another_split_does_not_count(tmp_path: Path) -> None:
    run, stop = run_double(tmp_path), EarlyStop(patience=1)
    stop.eval_end(run, {"test/loss": 1.0})
    assert stop.state() == {"best": None, "waited": 0, "counted": 0}


def test_a_run_at_its_end_is_not_stopped(tmp_path: Path) -> None:
    run, stop = run_double(tmp_path, step=100, num_steps=100), EarlyStop(patience=1)
    stop.eval_end(run, {"val/loss": 1.0})
    stop.eval_end(run, {"val/loss": 1.0})
    assert run.stop_reason is None


def test_a_metric_that_the_evaluation_does_not_give_is_a_problem(tmp_path: Path) -> None:
    run = run_double(tmp_path, eval={"metric": "val/f1", "mode": "max"})
    with pytest.raises(ConfigError) as caught:
        EarlyStop().eval_end(run, {"step": 1.0, "val/loss": 1.0, "val/accuracy": 0.5})
    assert str(caught.value) == (
        "1 problem in the config\n"
        "  eval.metric=val/f1: early_stop compares this metric, and the evaluation returns val/loss, val/accuracy."
    )
