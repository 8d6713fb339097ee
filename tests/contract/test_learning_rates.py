"""The learning rate as a function of the step: every schedule of conf/schedule, scaling and warmup, written out.

A schedule or warmup that is off by one step, or scaled by the wrong batch is caught here alone.
"""

import importlib
from typing import Any

import pytest
import yaml

from tests.contract.stepping import CONF
from trainkit.numerics.schedules import LearningRate, scale_lr

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
