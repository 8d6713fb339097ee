"""Memory limits of the ranks of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainkit.errors import Problem
from trainkit.strategies.partition.blocks import distinct_tensors
from trainkit.strategies.partition.solver import gib
from trainkit.strategies.pipeline.stage_assignment import StageAssignment

_KEY = "strategy.max_memory"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory that ranks may use, for all or by rank.

    Example:
        >>> Limits(given=2.0, num_ranks=2).of_rank(1) == 2 * 2**30
        True
    """

    given: float | Mapping[str, float] | None
    """GiB; None: no limit."""
    num_ranks: int
    """Ranks of a replica."""

    def of_rank(self, rank: int) -> float:
        """Return the limit of a rank in bytes, `math.inf` if there is none."""
        if isinstance(self.given, Mapping):
            return self.given.get(str(rank), math.inf) * 2**30
        return math.inf if self.given is None else self.given * 2**30

    def problems(self) -> list[Problem]:
        """Return problems: ranks that do not exist, and limits that are not positive."""
        if not isinstance(self.given, Mapping):
            return []
        ranks = [str(rank) for rank in range(self.num_ranks)]
        found = [
            Problem(key=f"{_KEY}.{rank}", value=limit, rule=f"no such rank: there are 0 to {self.num_ranks - 1}.")
            for rank, limit in self.given.items()
            if rank not in ranks
        ]
        return found + [
            Problem(key=f"{_KEY}.{rank}", value=limit, rule="must be more than 0.")
            for rank, limit in self.given.items()
            if limit <= 0
        ]

    def exceeded(
        self, cut: StageAssignment, bytes_of: Callable[[Tensor], int], kept: Sequence[int] | None
    ) -> list[Problem]:
        """Return a problem for each rank whose stages exceed its limit."""
        sizes = [sum(map(bytes_of, distinct_tensors([unit]))) for unit in cut.units]
        counted = "parameters, gradients and buffers"
        if kept is not None:
            counted = "parameters, gradients, buffers and the activations of a shard"
            sizes = [size + more for size, more in zip(sizes, kept, strict=True)]
        held = [0] * self.num_ranks
        for size, stage in zip(sizes, cut.stages, strict=True):
            held[stage % self.num_ranks] += size
        return [
            Problem(
                key=_KEY,
                value=self.shown,
                rule=f"rank {rank} takes {gib(self.of_rank(rank))}, and its stages hold {gib(size)} of {counted}. "
                "Use more stages, or activation_checkpointing=full.",
            )
            for rank, size in enumerate(held)
            if size > self.of_rank(rank)
        ]

    @property
    def shown(self) -> object:
        """The limits as the command line writes them."""
        if isinstance(self.given, Mapping):
            return "{" + ",".join(f"{rank}:{limit}" for rank, limit in self.given.items()) + "}"
        return self.given
