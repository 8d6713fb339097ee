"""The learning rate as a function of the step: every schedule of conf/schedule, scaling and warmup, written out.

A schedule or warmup that is off by one step, or scaled by the wrong batch is caught here alone.

A schedule of torch that is a step late, or milestones counted from the end of a warmup, are caught here alone.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import yaml
from torch.optim import lr_scheduler

from tests.contract.stepping import CONF
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.schedules import LearningRate, Step, scale_lr
from trainkit.run.planning.build import build_schedule, learning_rate_of

# (settings, factors over eight steps)
CURVES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [1, 1, 1, 1, 1, 1, 1, 1]),
    "linear": ({}, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
    "cosine": ({}, [1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060]),
    "step": ({}, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
    "inverse_sqrt": ({"timescale": 2}, [1, 0.816497, 0.707107, 0.632456, 0.577350, 0.534522, 0.5, 0.471405]),
    "warmup_stable_decay": ({"decay": 0.5}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
}


def schedule(name: str, settings: dict[str, Any]) -> Any:
    node = yaml.safe_load((CONF / "schedule" / f"{name}.yaml").read_text()) | settings
    module, _, target = node.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), target)(**node)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_a_schedule_follows_its_curve(name: str) -> None:
    settings, expected = CURVES[name]
    curve = schedule(name, settings)
    assert [curve(step, 8) for step in range(8)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_a_schedule_starts_at_the_peak_and_is_never_negative(name: str) -> None:
    curve = schedule(name, {})
    factors = [curve(step, 1000) for step in range(1000)]
    assert factors[0] == 1.0
    assert min(factors) >= 0.0
    assert curve(0, 1) == 1.0


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_peak_follows_the_global_batch_by_rule(rule: Any, expected: float) -> None:
    assert scale_lr(0.1, global_size=1024, reference_size=256, rule=rule) == pytest.approx(expected, rel=1e-15)
    assert scale_lr(0.1, global_size=1024, reference_size=None, rule=rule) == 0.1


def test_warmup_climbs_from_zero_to_the_peak_and_the_schedule_spans_the_rest() -> None:
    rate = LearningRate(base=0.1, peak=0.4, start=0.0, warmup_steps=4, num_steps=12, schedule=schedule("linear", {}))
    climb = [0.1, 0.2, 0.3, 0.4]
    fall = [0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05]
    assert [rate(step) for step in range(12)] == pytest.approx(climb + fall, rel=1e-12)


def test_goyals_warmup_climbs_from_the_base_rate() -> None:
    rate = LearningRate(base=0.1, peak=0.5, start=0.1, warmup_steps=4, num_steps=6, schedule=schedule("constant", {}))
    assert [rate(step) for step in range(6)] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rel=1e-12)
    assert rate.factor(3) == pytest.approx(5.0, rel=1e-15)


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
        lrs = rates(node, num_steps=6, warmup={"steps": 2})
    assert lrs == pytest.approx([0.05, 0.1, 0.05, 0.05, 0.1, 0.05])


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
