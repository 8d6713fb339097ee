"""Which keys give a strategy a number of replicas, and which change what they exchange: for `trainkit scale`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trainkit.strategies.base import PlanContext, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """The arguments by which a strategy exchanges less, or elsewhere; None where it has no such choice left."""

    compression: str | None = None
    """Gradients in 16 bits."""
    shared_memory: str | None = None
    """A sum through memory of the host."""
    num_servers: int | None = None
    """Parameter servers that it has."""
    spares: str | None = None
    """Replicas for which a step does not wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A strategy with a number of replicas."""

    keys: Mapping[str, int]
    """The keys of `strategy` that give it so many."""
    waits: bool = True
    """Whether a step ends only when all replicas have exchanged; they share its samples then."""
    remedies: Remedies = field(default_factory=Remedies)


@runtime_checkable
class ScalesOut(Protocol):
    """A strategy that can have any number of replicas, each on one device."""

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:
        """Return how it has so many replicas; pure."""


def scaled(strategy: Strategy, replicas: int, context: PlanContext) -> Scaled | None:
    """Return how a strategy has so many replicas; None where it cannot."""
    return strategy.scaled(replicas, context) if isinstance(strategy, ScalesOut) else None
