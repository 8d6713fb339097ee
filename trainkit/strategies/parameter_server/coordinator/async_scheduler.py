"""The scheduler of asynchronous updates: a ticket is a whole step, and every gradient is a separate update."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainkit.bounded import whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.base import JsonMap
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness


@dataclass(kw_only=True)
class AsyncScheduler(WorkScheduler):
    """Assigns whole steps to idle workers, and makes an update of each gradient when it arrives.

    With one worker, and in the first `warmup_steps`, this is the training of one device: a gradient is computed only
    after the previous one has been applied.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD, warm starting).
    """

    plan: BatchPlan
    staleness: Staleness
    warmup_steps: int = 0
    """Updates at the beginning during which one gradient at a time is computed."""
    until: int | None = None
    """Updates after which this start ends: no later step is assigned."""
    _again: list[int] = field(default_factory=list)
    _next: int = 0
    _staged: deque[tuple[WorkItem, int]] = field(default_factory=deque)

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the next gradient that the staleness policy accepts; rejected ones are assigned again."""
        while self._staged:
            item, read = self._staged.popleft()
            decision = self.staleness.decide(self.version - read)
            if decision.takes:
                return PendingUpdate(
                    version=self.version,
                    items=(item,),
                    reads=(read,),
                    factor=decision.factor,
                    lr_divisor=decision.lr_divisor,
                )
            self._discard(item)
            self._requeue(item)
        return None

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Assign the step of an overflowed update again."""
        for item in merge.items:
            self._requeue(item)

    def remember(self) -> JsonMap:
        """Return the steps that were assigned and are not applied."""
        staged = (item for item, _ in self._staged)
        steps = [item.ticket.step for item in (*self.running.values(), *staged)]
        return {"handed_out": sorted([*self._again, *steps])}

    def recall(self, remembered: JsonMap, version: int) -> None:
        """Restore the state: the remembered steps are assigned first."""
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

    def _accept(self, item: WorkItem, read: int) -> None:
        self._staged.append((item, read))

    def _requeue(self, item: WorkItem) -> None:
        self._again = sorted([*self._again, item.ticket.step])
