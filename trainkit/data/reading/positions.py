"""From tickets to the indices of their samples."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket, WeightedOrder

Request = tuple[int, list[int], list[int], list[int] | None]
"""An epoch, samples of it, the sizes of the shards that they form, and their positions where samples repeat."""

_BLOCK: Final = 1 << 16
"""Number of positions of the order computed at a time: 6 ms and half a megabyte."""


class Positions:
    """Converts tickets to sample indices; the order is computed a block at a time.

    Example:
        >>> plan = BatchPlan(num_samples=10, global_size=4, micro_size=2)
        >>> positions = Positions(plan, SampleOrder(num_samples=10, seed=0, shuffle=False))
        >>> positions.indices(Ticket(1, (0, 1))), positions.sizes(Ticket(1, (0, 1)))
        (array([4, 5, 6, 7]), [2, 2])
    """

    def __init__(self, plan: BatchPlan, order: SampleOrder | WeightedOrder) -> None:
        self.plan = plan
        self.order = order
        self._epoch = -1
        self._start = 0
        self.block: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """The samples at the positions from the block's start on."""
        self.version = 0
        """Counts the blocks, so that a copy on a device can be recognized as outdated."""

    def spans(self, ticket: Ticket) -> list[tuple[int, int]]:
        """Return the ranges of `block` that the shards take, in the ticket's order, adjacent ones joined."""
        plan = self.plan
        epoch, batch_start, batch_stop = plan.batch_range(ticket.step)
        if epoch != self._epoch or batch_start < self._start or batch_stop > self._start + len(self.block):
            self._compute(epoch, batch_start, batch_stop)
        offset = self._start
        if len(ticket.shards) == plan.num_shards(ticket.step) and ticket.shards == tuple(range(len(ticket.shards))):
            return [(batch_start - offset, batch_stop - offset)]
        joined: list[tuple[int, int]] = []
        for shard in ticket.shards:
            _, start, stop = plan.shard_range(ticket.step, shard)
            if joined and joined[-1][1] == start - offset:
                joined[-1] = (joined[-1][0], stop - offset)
            else:
                joined.append((start - offset, stop - offset))
        return joined

    def indices(self, ticket: Ticket) -> NDArray[np.int64]:
        """Return the samples of the ticket's shards, one shard after the other."""
        spans = self.spans(ticket)
        if len(spans) == 1:
            return self.block[slice(*spans[0])]
        return np.concatenate([self.block[start:stop] for start, stop in spans])

    def _places(self, ticket: Ticket) -> list[int]:
        """Return the position of each sample in its epoch."""
        ranges = [self.plan.shard_range(ticket.step, shard)[1:] for shard in ticket.shards]
        return [place for start, stop in ranges for place in range(start, stop)]

    def sizes(self, ticket: Ticket) -> list[int]:
        """Return the number of samples of each of the ticket's shards."""
        return [self.plan.shard_size(ticket.step, shard) for shard in ticket.shards]

    def request(self, ticket: Ticket) -> Request:
        """Return what a reader reads for a ticket."""
        indices = self.indices(ticket).tolist()
        repeats = not isinstance(self.order, SampleOrder)
        return self.epoch(ticket), indices, self.sizes(ticket), self._places(ticket) if repeats else None

    def epoch(self, ticket: Ticket) -> int:
        """Return the epoch of a ticket."""
        return self.plan.epoch(ticket.step)

    def _compute(self, epoch: int, start: int, stop: int) -> None:
        last = min(self.plan.num_samples, max(stop, start + _BLOCK))
        self.block = self.order.indices(epoch, start, last)
        self._epoch, self._start = epoch, start
        self.version += 1
