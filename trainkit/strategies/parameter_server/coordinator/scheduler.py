"""The chief's desk: who computes what, and which gradients make the next update. No thread, no socket, no tensor.

A desk hands out errands to workers that are free (`next`), hears of gradients that are staged (`report`) and of workers
that are gone (`leave`), and says what the next update is made of (`ready`). The chief carries that out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainkit.numerics.batch import Ticket

__all__ = ["PendingUpdate", "WorkItem", "WorkScheduler"]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A ticket in the hands of a worker."""

    number: int
    """Counts the errands of this start, and names the gradient that comes of it."""
    worker: str
    ticket: Ticket
    version: int
    """Updates that the variables had seen when it was handed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingUpdate:
    """What the next update is made of."""

    version: int
    """Updates before it."""
    errands: tuple[WorkItem, ...]
    """Whose gradients are summed, in the order of their steps and shards."""
    reads: tuple[int, ...]
    """Updates that the variables had seen when each was computed from them."""
    factor: float = 1.0
    """What the gradient is multiplied by."""
    lr_divisor: float = 1.0
    """What the learning rate is divided by."""

    @property
    def staleness(self) -> int:
        """Updates between the oldest read and this one."""
        return self.version - min(self.reads)


@dataclass(kw_only=True)
class WorkScheduler(ABC):
    """What every desk knows: who is there, and what they have in hand."""

    version: int = 0
    """Updates that the variables have seen."""
    running: dict[int, WorkItem] = field(default_factory=dict)
    """Errands by number, in the order in which they were handed out."""
    late: Counter[str] = field(default_factory=Counter)
    """Gradients that came for nothing, by worker."""
    _clocks: dict[str, int] = field(default_factory=dict)
    _thrown: list[WorkItem] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    @property
    def workers(self) -> tuple[str, ...]:
        """Who is there, in the order in which they came."""
        return tuple(self._clocks)

    def join(self, worker: str) -> None:
        """A worker is there; it begins with as many updates as the one that has fewest."""
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def leave(self, worker: str) -> tuple[WorkItem, ...]:
        """A worker is gone: what it had in hand is handed out again; what it may have staged of that is nobody's."""
        self._clocks.pop(worker, None)
        lost = tuple(errand for errand in self.running.values() if errand.worker == worker)
        for errand in lost:
            del self.running[errand.number]
            self._requeue(errand)
        return lost

    def next(self, worker: str) -> WorkItem | None:
        """What a free worker shall compute; None: wait for an update, or for the end."""
        ticket = self._choose(worker)
        if ticket is None:
            return None
        errand = WorkItem(next(self._numbers), worker, ticket, self.version)
        self.running[errand.number] = errand
        return errand

    def number_after(self, other: WorkScheduler) -> None:
        """Give errands numbers that none of another desk's has, whose gradients may still come."""
        self._numbers = other._numbers

    def pulled(self, number: int) -> None:  # noqa: ARG002 - only a replay waits for it
        """A worker has read what its errand is to be computed from."""
        return

    def report(self, number: int, read: int) -> None:
        """A gradient is staged.

        Args:
            number: of its errand; one that was given up meanwhile is thrown away.
            read: updates that the variables had seen when it was computed from them.
        """
        errand = self.running.pop(number, None)
        if errand is not None:
            self._accept(errand, read)

    def pop_discarded(self) -> tuple[WorkItem, ...]:
        """The errands whose gradients nobody needs, since the last call."""
        thrown, self._thrown = tuple(self._thrown), []
        return thrown

    @abstractmethod
    def next_ready_update(self) -> PendingUpdate | None:
        """What the next update is made of, once it is all there."""

    def merged(self, merge: PendingUpdate) -> None:
        """The update was made, or left out by policy: the variables are a version further."""
        for errand in merge.errands:
            if errand.worker in self._clocks:
                self._clocks[errand.worker] += 1
        self.version += 1

    @abstractmethod
    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """The update overflowed: its shards are handed out again, before any other."""

    @abstractmethod
    def remember(self) -> dict[str, Any]:
        """What a checkpoint keeps of what is handed out and not applied; JSON."""

    @abstractmethod
    def recall(self, remembered: Mapping[str, Any], version: int) -> None:
        """Begin at a version, with what `remember` gave."""

    @abstractmethod
    def _choose(self, worker: str) -> Ticket | None:
        """What comes next for a worker."""

    @abstractmethod
    def _accept(self, errand: WorkItem, read: int) -> None:
        """Keep a gradient for an update, or throw it away."""

    @abstractmethod
    def _requeue(self, errand: WorkItem) -> None:
        """Hand it out again."""

    def _discard(self, errand: WorkItem) -> None:
        """Nobody needs this gradient."""
        self._thrown.append(errand)
        self.late[errand.worker] += 1

    def _slowest(self) -> int:
        """The updates of the worker that has fewest."""
        return min(self._clocks.values(), default=0)
