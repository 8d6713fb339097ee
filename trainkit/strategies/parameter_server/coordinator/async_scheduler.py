"""The desk of asynchronous updates: a ticket is a whole step, and every gradient is an update of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.bounded_json import whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness

__all__ = ["AsyncScheduler"]


@dataclass(kw_only=True)
class AsyncScheduler(WorkScheduler):
    """Hands whole steps to whoever is free, and makes an update of each gradient when it comes.

    With one worker, and in the first `warmup_steps`, this is the training of one device: a gradient is computed only
    when the one before it has been applied.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD, warm starting).
    """

    plan: BatchPlan
    staleness: Staleness
    warmup_steps: int = 0
    """Updates at the beginning in which one gradient at a time is computed."""
    until: int | None = None
    """Updates after which this start ends: no step past it is handed out."""
    _again: list[int] = field(default_factory=list)
    _next: int = 0
    _staged: deque[tuple[WorkItem, int]] = field(default_factory=deque)

    def next_ready_update(self) -> PendingUpdate | None:
        """The next gradient that the policy takes; those that it does not take are handed out again."""
        while self._staged:
            errand, read = self._staged.popleft()
            verdict = self.staleness.decide(self.version - read)
            if verdict.takes:
                return PendingUpdate(
                    version=self.version,
                    errands=(errand,),
                    reads=(read,),
                    factor=verdict.factor,
                    lr_divisor=verdict.lr_divisor,
                )
            self._discard(errand)
            self._requeue(errand)
        return None

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Its step is handed out again."""
        for errand in merge.errands:
            self._requeue(errand)

    def remember(self) -> dict[str, Any]:
        """The steps that were handed out and are not applied."""
        staged = (errand for errand, _ in self._staged)
        steps = [errand.ticket.step for errand in (*self.running.values(), *staged)]
        return {"handed_out": sorted([*self._again, *steps])}

    def recall(self, remembered: Mapping[str, Any], version: int) -> None:
        """Those steps come first."""
        self.version = version
        self._again = sorted(whole_numbers(remembered.get("handed_out", [])))
        self._next = version + len(self._again)

    def _choose(self, worker: str) -> Ticket | None:
        if self.version < self.warmup_steps and self.running:
            return None
        if not self.staleness.may_begin(self._clocks[worker], self._slowest()):
            return None
        if self._again:
            step = self._again.pop(0)
        elif self.until is None or self._next < self.until:
            step, self._next = self._next, self._next + 1
        else:
            return None
        return Ticket(step, tuple(range(self.plan.num_shards(step))))

    def _accept(self, errand: WorkItem, read: int) -> None:
        self._staged.append((errand, read))

    def _requeue(self, errand: WorkItem) -> None:
        self._again = sorted([*self._again, errand.ticket.step])
