"""A run that stops early or lowers its learning rate at another evaluation than it must, also after a resume, is
caught here alone: `callbacks=[early_stop]` and `callbacks=[plateau]`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.callbacks.run_double import run_double
from tests.contract.running import run
from trainkit.callbacks.monitored import EarlyStop, Plateau
from trainkit.errors import ConfigError

ACCURACY = {"metric": "val/accuracy", "mode": "max", "every_steps": 1, "every_epochs": None}
RISING = (
    "model=net", "data=points", "epochs=6", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.maximize=true",
    "schedule=constant", "batch.global_size=16", "batch.micro_size=8", "log_every_steps=1", "callbacks=[plateau]",
    "callbacks.plateau.patience=1", "callbacks.plateau.factor=0.5",
)  # fmt: skip


def reason_after(stop: EarlyStop, values: list[float]) -> str | None:
    """Why a run ends after evaluations with these accuracies, one a step."""
    watched = run_double(Path(), eval=ACCURACY)
    for value in values:
        watched.state.step = stop.state()["counted"] + 1
        stop.eval_end(watched, {"step": 10.0, "val/loss": 9.0, "val/accuracy": value})
    return watched.stop_reason


@pytest.mark.parametrize(
    ("values", "min_delta", "stops"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.0, False),
        ([0.4, 0.3, 0.4], 0.0, True),
        ([0.4, 0.3, 0.5, 0.4], 0.0, False),
        ([0.4, 0.45, 0.5], 0.1, True),
        ([0.4, math.nan, math.nan], 0.0, True),
        ([math.nan, 0.1], 0.0, False),
    ],
)
def test_a_run_ends_when_its_metric_stands_still(values: list[float], min_delta: float, stops: bool) -> None:
    reason = reason_after(EarlyStop(patience=2, min_delta=min_delta), values)
    assert reason == ("val/accuracy has not improved for 2 evaluations" if stops else None)


def test_a_resumed_run_goes_on_counting() -> None:
    first, second = EarlyStop(patience=3), EarlyStop(patience=3)
    assert reason_after(first, [0.5, 0.4, 0.4]) is None
    assert first.state().items() >= {"best": 0.5, "waited": 2, "counted": 3}.items()
    second.restore(first.state())
    assert reason_after(second, [0.5]) == "val/accuracy has not improved for 3 evaluations"


@pytest.mark.parametrize(
    ("evaluations", "best", "stops"),
    [
        ([(10, "val/loss", 0.5), (20, "val/loss", 0.4)], 0.4, False),  # less is better without a choice
        ([(10, "val/loss", 0.5), (20, "val/loss", 0.6)], 0.5, True),
        ([(10, "val/loss", 0.5), (14, "val/loss", 0.6), (20, "val/loss", 0.4)], 0.4, False),  # stop_at_step=14, resumed
        ([(10, "test/loss", 0.5), (20, "test/loss", 0.6)], None, False),
        ([(90, "val/loss", 0.5), (100, "val/loss", 0.6)], 0.5, False),  # the last step
    ],
)
def test_only_due_evaluations_of_the_split_before_the_end_count(
    evaluations: list[tuple[int, str, float]], best: float | None, stops: bool
) -> None:
    watched = run_double(Path(), num_steps=100, eval={"every_steps": 10, "every_epochs": None})
    stop = EarlyStop(patience=1)
    for watched.state.step, metric, value in evaluations:
        stop.eval_end(watched, {metric: value})
    assert stop.state()["best"] == best
    assert watched.stop_reason == ("val/loss has not improved for 1 evaluation" if stops else None)


def test_a_metric_that_the_evaluation_does_not_give_is_a_problem() -> None:
    watched = run_double(Path(), eval={"metric": "val/f1", "mode": "max"})
    with pytest.raises(ConfigError, match=r"eval\.metric=val/f1: early_stop .* returns val/loss, val/accuracy\."):
        EarlyStop().eval_end(watched, {"step": 1.0, "val/loss": 1.0, "val/accuracy": 0.5})


@pytest.mark.parametrize(
    "settings",
    [{"patience": 1}, {"patience": 0, "cooldown": 2}, {"patience": 1, "threshold": 0.2, "threshold_mode": "abs"}],
)
def test_the_factors_of_a_plateau_are_those_of_torch(settings: dict[str, Any]) -> None:
    values = [1.0, 0.9, 0.95, 0.9, 0.91, 0.89, 0.895, 0.9, math.nan, 0.9, 0.5, 0.6, 0.6, 0.6, 0.6]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torch_s, ours = ReduceLROnPlateau(optimizer, factor=0.5, **settings), Plateau(factor=0.5, **settings)
    watched = run_double(Path(), eval={"every_steps": 1})
    for step, value in enumerate(values, start=1):
        torch_s.step(value)
        watched.state.step = step
        ours.eval_end(watched, {"step": step, "val/loss": value})
        assert ours.rate_factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "placement",
    [
        ("strategy=mirrored", "strategy.replicas=2"),
        ("strategy=parameter_server", "strategy.workers=2"),
        ("strategy=local_sgd", "strategy.replicas=1", "strategy.average_every=3"),
    ],
    ids=["mirrored", "parameter_server", "local_sgd"],
)
def test_a_run_that_is_stopped_and_resumed_takes_the_same_rates(tmp_path: Path, placement: tuple[str, ...]) -> None:
    # The loss rises from step 3 on: the evaluations at 6 and 9 are bad, and so are those at 12 and 15.
    run(tmp_path, *RISING, *placement, "stop_at_step=10")
    run(tmp_path, *RISING, *placement, "resume=auto")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if "lr" in row] == pytest.approx([0.05] * 9 + [0.025] * 6 + [0.0125] * 3)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *RISING)
    run(tmp_path / "parts", *RISING, "stop_at_step=10")
    assert run(tmp_path / "parts", *RISING, "resume=auto")["weights_sha256"] == whole["weights_sha256"]
