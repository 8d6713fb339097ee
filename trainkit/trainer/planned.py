"""Describe a run to its callbacks before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.config.schema import RunConfig
from trainkit.objectives.base import Objective
from trainkit.strategies.base import Facts


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned run."""

    key: str
    """Key of the called callback, `callbacks.confusion`."""
    cfg: RunConfig
    """The config; its microbatch may not be resolved yet."""
    objective: Objective
    datasets: Mapping[str, Any]
    """Split -> dataset."""
    sample: Any
    """A sample of the training data, not collated; None if it cannot be indexed."""
    strategy_facts: Facts
    """The properties of the strategy."""
