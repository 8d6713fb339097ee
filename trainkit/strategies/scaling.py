"""The keys that set the number of replicas of a strategy, and keys that change the exchange: for `trainkit scale`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trainkit.strategies.base import PlanContext, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """The arguments by which a strategy exchanges less, or over another path; None if it has no such option."""

    compression: str | None = None
    """Argument that sends gradients in 16 bits."""
    shared_memory: str | None = None
    """Argument that sums through memory of the host."""
    num_servers: int | None = None
    """Number of parameter servers."""
    spares: str | None = None
    """The key whose number adds replicas for which a step does not wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A strategy with a number of replicas."""

    keys: Mapping[str, int]
    """The keys of `strategy` that set this number."""
    waits: bool = True
    """Whether a step ends only when all replicas have exchanged; they then share its samples."""
    remedies: Remedies = field(default_factory=Remedies)


@runtime_checkable
class ScalesOut(Protocol):
    """A strategy that can have any number of replicas, each on one device."""

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:
        """Return the strategy with `replicas` replicas; pure."""


def scaled(strategy: Strategy, replicas: int, context: PlanContext) -> Scaled | None:
    """Return a strategy with `replicas` replicas; None if it does not scale."""
    return strategy.scaled(replicas, context) if isinstance(strategy, ScalesOut) else None
