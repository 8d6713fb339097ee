"""Notes and problems of keys that have no effect, or not all of it, on the data and the model of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from torch import nn

from trainkit.config.targets.build import resolve_target
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.build import matching_groups
from trainkit.run.planning.plan import RunPlan

_SHOWN: Final = 6
"""Names of parameters in a note."""


def is_never_given(_key: str) -> bool:
    """Return False: without a composition, such as in the trainings of `prove`, no key counts as set by the user."""
    return False


def key_notes(plan: RunPlan, model: nn.Module, is_given: Callable[[str], bool]) -> list[str]:
    """Return notes about the warmup, the validation split and the groups of parameters.

    Args:
        plan: the run.
        model: the model, possibly without data.
        is_given: whether the user set a key. What a recipe, a default or the run to resume set is noted, not refused.

    Raises:
        ConfigError: a key that the user set has no effect, or not all of it.
    """
    found = [*_longer_warmup(plan), *_without_validation(plan), *_unmatched(plan, model)]
    if problems := [problem for problem, _ in found if is_given(problem.key)]:
        raise ConfigError(problems)
    return [*(note for _, note in found if note), *_no_validation(plan), *_members(plan, model)]


def _longer_warmup(plan: RunPlan) -> Iterator[tuple[Problem, str]]:
    """Yield the problem of a warmup that is longer than the training."""
    steps, most, warmup = plan.rate.warmup_steps, plan.num_steps, plan.cfg.warmup
    if steps <= most:
        return
    name, value = ("steps", warmup.steps) if warmup.epochs is None else ("epochs", warmup.epochs)
    rule = f"{steps} steps of warmup, and the training has {most}. Use {most} or fewer."
    reached = f"at step {most} the rate is {plan.rate(most - 1):.3g} of {plan.rate.peak:g}"
    note = f"warmup.{name}={value} is {steps} steps: the run ends inside it, {reached}"
    yield Problem(key=f"warmup.{name}", value=value, rule=rule), note


def _has_validation(plan: RunPlan) -> bool:
    return "val" in plan.components.datasets


def _without_validation(plan: RunPlan) -> Iterator[tuple[Problem, str]]:
    """Yield the problems of what goes by a metric of a validation split that the data does not have."""
    if _has_validation(plan):
        return
    metric = plan.cfg.eval.metric
    if metric is not None and metric.startswith("val/"):
        rule = "no metric gives it: the data has no validation split. Leave it out, or use data that has one."
        yield Problem(key="eval.metric", value=metric, rule=rule), f"eval.metric={metric} is left out"
    for name, node in plan.cfg.callbacks.items():
        if getattr(resolve_target(node["_target_"]), "decides_by_figures", False):
            rule = "goes by evaluations, and the data has no validation split. Leave it out, or use data that has one."
            yield Problem(key=f"callbacks.{name}", rule=rule), f"callbacks.{name} has no effect"


def _no_validation(plan: RunPlan) -> Iterator[str]:
    if not _has_validation(plan):
        yield "the data has no validation split: nothing is evaluated, and no checkpoint is the best"


def _unmatched(plan: RunPlan, model: nn.Module) -> Iterator[tuple[Problem, str]]:
    """Yield the problems of patterns that match no parameter, and of groups whose parameters are in earlier groups."""
    groups = plan.cfg.optimizer.get("groups") or {}
    found = matching_groups(model, groups)
    for name, settings in groups.items():
        key = f"optimizer.groups.{name}"
        absent = [pattern for pattern, matched in found.patterns[name].items() if not matched]
        for pattern in absent:
            rule = "matches no parameter that is trained. Correct the pattern, or leave it out."
            yield Problem(key=f"{key}.match", value=pattern, rule=rule), ""  # as shipped, they suit many models
        if len(absent) < len(settings["match"]) and not found.members[name]:
            rule = "holds no parameter: those that it matches are in earlier groups. Order the groups anew."
            yield Problem(key=key, rule=rule), ""


def _members(plan: RunPlan, model: nn.Module) -> Iterator[str]:
    """Yield which parameters each group holds."""
    groups = plan.cfg.optimizer.get("groups") or {}
    found = matching_groups(model, groups).members
    count = sum(map(len, found.values()))
    for name in groups:
        held = found[name]
        more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
        listed = f"{len(held)} of {count} parameters: {', '.join(held[:_SHOWN])}{more}" if held else "no parameter"
        yield f"optimizer.groups.{name} holds {listed}"
