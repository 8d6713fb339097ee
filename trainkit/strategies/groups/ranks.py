"""The ranks that a task computes with: joined when it begins, left when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from trainkit.objectives.base import Collective
from trainkit.strategies.groups.collective import LocalCollective

__all__ = ["RankGroup", "SingleRank"]


class RankGroup(Protocol):
    """The connections of a task to the others."""

    @property
    def data_ranks(self) -> Collective:
        """Sums of small tensors over the data ranks."""
        ...

    @property
    def all_ranks(self) -> Collective:
        """The same over all processes."""
        ...

    def close(self, *, failed: bool) -> None:
        """Leave the others.

        Args:
            failed: whether to break the connections without waiting for them.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SingleRank:
    """The group of a task that computes alone."""

    data_ranks: Collective = field(default_factory=LocalCollective)
    all_ranks: Collective = field(default_factory=LocalCollective)

    def close(self, *, failed: bool) -> None:
        """Do nothing: there is no connection."""
