"""Resolve `loader.num_workers=auto` before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import IN_PROCESS, TARGET, root_of
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.plan import RunPlan

ChooseWorkers = Callable[[RunPlan], tuple[int, str]]
"""Function that returns the number of data loading processes for a plan, and a note about it."""

_KEY: Final = "loader.num_workers"


def with_workers(plan: RunPlan, choose: ChooseWorkers | None) -> tuple[RunPlan, str]:
    """Return the plan with a number instead of `auto`, and a note about it.

    Args:
        plan: the plan of a run that is about to begin.
        choose: measures the number; None if that is impossible.

    Raises:
        ConfigError: `auto` cannot be measured for this run.
    """
    if choose is None or plan.backend is not None or _has_objects(plan.cfg):
        raise ConfigError([_unmeasured()])
    number, note = choose(plan)
    cfg = replace(plan.cfg, loader=replace(plan.cfg.loader, num_workers=number))
    return replace(plan, cfg=cfg), f"{_KEY}=auto: {note}"


def refuse_open_workers(cfg: RunConfig) -> None:
    """Refuse `auto` if no run begins.

    Raises:
        ConfigError: `loader.num_workers` is `auto`.
    """
    if cfg.loader.num_workers == "auto":
        raise ConfigError([_unmeasured()])


def _has_objects(cfg: RunConfig) -> bool:
    """Return whether a target is an object of this session, which another process cannot build."""
    nodes = (cfg.model, cfg.data, cfg.objective, cfg.optimizer)
    return any(root_of(str(node.get(TARGET, ""))) == IN_PROCESS for node in nodes)


def _unmeasured() -> Problem:
    rule = (
        "is measured by short trainings in processes that trainkit starts on this host, and here it starts none. Give "
        "a number: trainkit bench --data finds it."
    )
    return Problem(key=_KEY, value="auto", rule=rule)
