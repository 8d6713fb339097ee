"""A schedule of torch that is a step late, or milestones counted from the end of a warmup, are caught here alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.schedules import Step
from trainkit.run.planning.build import build_schedule, learning_rate_of

HOME = "torch.optim.lr_scheduler"
BATCH = BatchPlan(num_samples=40, global_size=10, micro_size=10)


def rates(node: dict[str, Any], *, num_steps: int = 12, **settings: Any) -> list[float]:
    cfg = RunConfig.from_dict({"optimizer": {"lr": 0.1}, **settings})
    rate = learning_rate_of(cfg, BATCH, num_steps, 0.1, build_schedule(node))
    return [rate(step) for step in range(num_steps)]


@pytest.mark.parametrize(("name", "settings"), [
    ("StepLR", {"step_size": 3}), ("MultiStepLR", {"milestones": [2, 5]}), ("ExponentialLR", {"gamma": 0.9}),
    ("CosineAnnealingLR", {"T_max": 12, "eta_min": 0.01}), ("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2}),
    ("OneCycleLR", {"max_lr": 0.5, "total_steps": 12, "cycle_momentum": False}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4, "cycle_momentum": False}),
])  # fmt: skip
def test_the_rates_are_those_of_torch(name: str, settings: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler, expected = getattr(lr_scheduler, name)(optimizer, **settings), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates({"_target_": f"{HOME}.{name}", **settings}) == pytest.approx(expected, rel=1e-12)


def test_schedulers_follow_each_other_after_a_warmup() -> None:
    parts = [
        {"_target_": f"{HOME}.ConstantLR", "factor": 0.5, "total_iters": 9},
        {"_target_": f"{HOME}.ExponentialLR", "gamma": 0.5},
    ]
    node = {"_target_": f"{HOME}.SequentialLR", "schedulers": parts, "milestones": [2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rates(node, num_steps=6, warmup={"steps": 2})
    assert found == pytest.approx([0.05, 0.1, 0.05, 0.05, 0.1, 0.05])


def test_the_batch_scales_the_rates_of_torch() -> None:
    node = {"_target_": f"{HOME}.StepLR", "step_size": 1}
    assert rates(node, num_steps=2, lr_scaling={"reference_batch": 5}) == pytest.approx([0.2, 0.02])


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("ReduceLROnPlateau", {}, r"follows a metric, .* Use callbacks=\[plateau\]"),
    ("OneCycleLR", {"max_lr": 0.5, "total_steps": 12}, "also changes the momentum"),
    ("OneCycleLR", {"max_lr": 0.5, "total_steps": 5, "cycle_momentum": False}, "cannot give the rates of 12 steps"),
])  # fmt: skip
def test_what_is_no_function_of_the_step_is_refused_by_name(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        rates({"_target_": f"{HOME}.{name}", **settings})


def test_milestones_in_epochs_and_steps_count_from_the_start_of_the_training() -> None:
    expected = [0.05] + [0.1] * 3 + [0.01] * 4 + [0.001] * 4
    step = {"_target_": "trainkit.schedules.Step", "gamma": 0.1}
    warm: dict[str, Any] = {"warmup": {"steps": 2}}
    assert rates({**step, "milestones_epochs": [1, 2]}, **warm) == pytest.approx(expected)
    assert rates({**step, "milestones_steps": [4, 8]}, **warm) == pytest.approx(expected)
    assert rates({**step, "milestones_epochs": [1, 2]}, num_steps=20, **warm)[:12] == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "message"), [
    ({"milestones_epochs": (2.0, 1.0)}, "must be increasing, each above 0"),
    ({"milestones_epochs": (1.0,), "milestones_steps": (3,)}, "Give one of"),
    ({"milestones": (30.0,)}, "Epochs: schedule.milestones_epochs; steps: schedule.milestones_steps"),
])  # fmt: skip
def test_milestones_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Step(**settings)


def test_a_milestone_within_the_warmup_is_refused() -> None:
    step = {"_target_": "trainkit.schedules.Step", "milestones_epochs": [0.5]}
    with pytest.raises(ConfigError, match="the first one is step 2, within the warmup of 3 steps"):
        rates(step, warmup={"steps": 3})
