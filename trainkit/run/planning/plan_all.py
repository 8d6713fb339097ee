"""Plan every point of a sweep before the first one runs, so that problems that need a plan are reported at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.config.composition import Composition, problems_of_points
from trainkit.data.splits import build_splits, folded
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan


def plan_all_points(compositions: Sequence[Composition], *, num_gpus: int | None = None) -> list[int]:
    """Plan all compositions without starting any.

    A point that continues another run is skipped: its auto values come from that run. A dataset is read once for all
    consecutive points that use it.

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
            model_notes(plan, meta_model(plan), composition.is_given)
        except ConfigError as error:
            problems[-1] += composition.with_origins(error).problems
    if any(problems):
        raise ConfigError(problems_of_points(compositions, problems))
    return lengths
