"""A run for callbacks to look at, without a training behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainkit.config.schema import RunConfig
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.schedules import Constant, LearningRate
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.events import Run, State


def run_double(folder: Path, *, step: int = 0, num_steps: int = 100, is_owner: bool = True, **cfg: Any) -> Run:
    plan = BatchPlan(num_samples=1000, global_size=10, micro_size=10, drop_last=False)
    rate = LearningRate(base=0.1, peak=0.1, start=0.0, warmup_steps=0, num_steps=num_steps, schedule=Constant())
    return Run(
        folder=folder,
        cfg=RunConfig.from_dict({"name": "digits", **cfg}),
        summary={},
        plan=plan,
        num_steps=num_steps,
        rate=rate,
        state=State(plan=plan, step=step),
        begun_at=step,
        is_owner=is_owner,
        model=torch.nn.Linear(1, 1),
        device=torch.device("cpu"),
        collective=LocalCollective(),
    )


def row(step: int, loss: float = 0.5) -> dict[str, float]:
    return {
        "step": step,
        "epoch": step / 100,
        "samples": step * 10,
        "seconds": step / 10,
        "train/loss": loss,
        "lr": 0.1,
        "samples_per_s": 412_000.0,
        "data_wait": 0.03,
    }
