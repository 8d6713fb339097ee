"""The learning rate follows an evaluation: `callbacks=[plateau]`."""

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
from trainkit.callbacks.plateau import Plateau

VALUES = [1.0, 0.9, 0.95, 0.9, 0.91, 0.89, 0.895, 0.9, math.nan, 0.9, 0.5, 0.6, 0.6, 0.6, 0.6]
RISING = (
    "model=net", "data=points", "epochs=6", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.maximize=true",
    "schedule=constant", "batch.global_size=16", "batch.micro_size=8", "log_every_steps=1", "callbacks=[plateau]",
    "callbacks.plateau.patience=1", "callbacks.plateau.factor=0.5",
)  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{"patience": 1}, {"patience": 0, "cooldown": 2}, {"patience": 1, "threshold": 0.2, "threshold_mode": "abs"}],
)
def test_the_factors_are_those_of_torch(settings: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torch_s, ours = ReduceLROnPlateau(optimizer, factor=0.5, **settings), Plateau(factor=0.5, **settings)
    a_run = run_double(Path(), eval={"every_steps": 1})
    for step, value in enumerate(VALUES, start=1):
        torch_s.step(value)
        a_run.state.step = step
        ours.eval_end(a_run, {"step": step, "val/loss": value})
        assert ours.rate_factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])


def rates(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["lr"] for row in rows if "lr" in row]


@pytest.mark.parametrize(
    "placement",
    [
        (),
        ("strategy=mirrored", "strategy.replicas=2"),
        ("strategy=fsdp", "strategy.replicas=2"),
        ("strategy=parameter_server", "strategy.workers=2"),
        ("strategy=local_sgd", "strategy.replicas=1", "strategy.average_every=3"),
    ],
    ids=["one_device", "mirrored", "fsdp", "parameter_server", "local_sgd"],
)
def test_a_run_that_is_stopped_and_resumed_takes_the_same_rates(tmp_path: Path, placement: tuple[str, ...]) -> None:
    # The loss rises from step 3 on: the evaluations at 6 and 9 are bad, and so are those at 12 and 15.
    expected = [0.05] * 9 + [0.025] * 6 + [0.0125] * 3
    run(tmp_path, *RISING, *placement, "stop_at_step=10")
    run(tmp_path, *RISING, *placement, "resume=auto")
    assert rates(tmp_path) == pytest.approx(expected)


def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *RISING)
    run(tmp_path / "parts", *RISING, "stop_at_step=10")
    assert run(tmp_path / "parts", *RISING, "resume=auto")["weights_sha256"] == whole["weights_sha256"]
