"""Ask the callbacks of a config whether they can look at the run."""

from __future__ import annotations

from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, class_built_by
from trainkit.errors import Problem
from trainkit.run.planning.build import Components
from trainkit.strategies.capabilities import traits_here
from trainkit.trainer.events import Callback
from trainkit.trainer.planned import Planned


def callback_problems(cfg: RunConfig, parts: Components) -> list[Problem]:
    """Return the problems of the callbacks that judge a run; others are not built here."""
    found: list[Problem] = []
    for name, node in cfg.callbacks.items():
        kind = class_built_by(node)
        if kind is None or not issubclass(kind, Callback) or kind.validate is Callback.validate:
            continue
        planned = Planned(
            key=f"callbacks.{name}",
            cfg=cfg,
            objective=parts.objective,
            datasets=parts.datasets,
            sample=parts.sample,
            traits=traits_here(parts.strategy),
        )
        callback: Callback = build(node, planned.key)
        found += callback.validate(planned)
    return found
