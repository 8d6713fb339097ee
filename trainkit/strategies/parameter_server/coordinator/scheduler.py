"""Work scheduler of the chief: it assigns work items to workers and chooses the gradients of the next update, without
threads, sockets and tensors.

A scheduler assigns work items to idle workers (`next`), is notified of staged gradients (`report`) and of lost workers
(`leave`), and returns the next update (`next_ready_update`), which the dispatcher applies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import JsonMap


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A ticket that is assigned to a worker."""

    number: int
    """Number of the item since this start; part of the name of its gradient."""
    worker: str
    ticket: Ticket
    version: int
    """Version of the variables (number of updates) when it was assigned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingUpdate:
    """The gradients of the next update."""

    version: int
    """Number of updates before this one."""
    items: tuple[WorkItem, ...]
    """The work items whose gradients are summed, in the order of their steps and shards."""
    reads: tuple[int, ...]
    """For each item, the version of the variables from which it was computed."""
    factor: float = 1.0
    """Factor of the gradient."""
    lr_divisor: float = 1.0
    """Divisor of the learning rate."""

    @property
    def staleness(self) -> int:
        """Number of updates between the oldest read and this one."""
        return self.version - min(self.reads)


@dataclass(kw_only=True)
class WorkScheduler(ABC):
    """The state common to all schedulers: the workers and their work items."""

    version: int = 0
    """Version of the variables: their number of updates."""
    running: dict[int, WorkItem] = field(default_factory=dict)
    """Work items by number, in the order in which they were assigned."""
    late: Counter[str] = field(default_factory=Counter)
    """Number of discarded gradients by worker."""
    _clocks: dict[str, int] = field(default_factory=dict)
    _thrown: list[WorkItem] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers, in the order in which they joined."""
        return tuple(self._clocks)

    def join(self, worker: str) -> None:
        """Add a worker; its update count starts at that of the slowest worker."""
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def leave(self, worker: str) -> tuple[WorkItem, ...]:
        """Remove a worker and requeue its work items; return them, so that their staged gradients can be discarded."""
        self._clocks.pop(worker, None)
        lost = tuple(item for item in self.running.values() if item.worker == worker)
        for item in lost:
            del self.running[item.number]
            self._requeue(item)
        return lost

    def next(self, worker: str) -> WorkItem | None:
        """Return the next work item of an idle worker; None: it must wait for an update, or for the end."""
        ticket = self._choose(worker)
        if ticket is None:
            return None
        item = WorkItem(next(self._numbers), worker, ticket, self.version)
        self.running[item.number] = item
        return item

    def number_after(self, other: WorkScheduler) -> None:
        """Continue the numbering of another scheduler, whose gradients may still arrive."""
        self._numbers = other._numbers

    def pulled(self, number: int) -> None:  # noqa: ARG002 - only a replay waits for it
        """Record that a worker has read the variables for a work item."""
        return

    def report(self, number: int, read: int) -> None:
        """Record that a gradient, computed after `read` updates, is staged; ignored if its work item was requeued."""
        item = self.running.pop(number, None)
        if item is not None:
            self._accept(item, read)

    def pop_discarded(self) -> tuple[WorkItem, ...]:
        """Return the work items whose gradients are no longer needed, since the last call."""
        thrown, self._thrown = tuple(self._thrown), []
        return thrown

    @abstractmethod
    def next_ready_update(self) -> PendingUpdate | None:
        """Return the next update, once all its gradients have arrived."""

    def merged(self, merge: PendingUpdate) -> None:
        """Record that the update was made, or skipped by policy: the version advances."""
        for item in merge.items:
            if item.worker in self._clocks:
                self._clocks[item.worker] += 1
        self.version += 1

    @abstractmethod
    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Assign the shards of an overflowed update again, before any others."""

    @abstractmethod
    def remember(self) -> JsonMap:
        """Return the assigned and not applied work for a checkpoint, as JSON."""

    @abstractmethod
    def recall(self, remembered: JsonMap, version: int) -> None:
        """Start at a version, with the state that `remember` returned."""

    @abstractmethod
    def _choose(self, worker: str) -> Ticket | None:
        """Choose the next ticket for a worker."""

    @abstractmethod
    def _accept(self, item: WorkItem, read: int) -> None:
        """Accept a gradient for an update, or discard it."""

    @abstractmethod
    def _requeue(self, item: WorkItem) -> None:
        """Assign a work item again."""

    def _discard(self, item: WorkItem) -> None:
        """Mark a gradient as no longer needed."""
        self._thrown.append(item)
        self.late[item.worker] += 1

    def _slowest(self) -> int:
        """Return the update count of the slowest worker."""
        return min(self._clocks.values(), default=0)
