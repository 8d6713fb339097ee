"""Plan every point of a sweep before the first one runs, so that problems that need a plan are reported at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from trainkit.config.composition import Composition, problems_of_points
from trainkit.data.splits import build_splits, folded
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan


def plan_all_points(
    compositions: Sequence[Composition],
    *,
    num_gpus: int | None = None,
    check: Callable[[RunPlan, nn.Module], Sequence[Problem]] = lambda *_: (),
) -> list[int]:
    """Plan all compositions without starting any.

    A point that continues another run is skipped: its auto values come from that run. A dataset is read once for all
    consecutive points that use it.

    Args:
        compositions: the points.
        num_gpus: GPUs of the host of each; None: those of this one.
        check: returns further problems of a plan and its model without data.

    Returns:
        The number of steps of each training; 0 if it continues another run.

    Raises:
        ConfigError: every problem of every plan, with the points that have it.
        DataError: a dataset is absent, damaged or empty.
    """
    problems: list[list[Problem]] = []
    known: str | None = None
    splits: Mapping[str, Any] = {}
    lengths = []
    for composition in compositions:
        cfg = composition.cfg
        lengths.append(0)
        problems.append([])
        if cfg.resume is not None:
            continue
        try:
            if known != (node := json.dumps(cfg.data, default=str)):
                splits, known = build_splits(cfg.data), node
            plan = make_plan(cfg, num_gpus=num_gpus, splits=folded(splits, cfg.cv))
            lengths[-1] = plan.num_steps
            model = meta_model(plan)
            model_notes(plan, model, composition.is_given)
            problems[-1] += check(plan, model)
        except ConfigError as error:
            problems[-1] += composition.with_origins(error).problems
    if any(problems):
        raise ConfigError(problems_of_points(compositions, problems))
    return lengths
