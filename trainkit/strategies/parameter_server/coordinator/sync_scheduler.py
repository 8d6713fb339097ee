"""The scheduler of synchronous updates: a ticket is a shard of a step; spare replicas replace slow workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trainkit.bounded import expect_map, whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.base import JsonMap
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler


@dataclass(kw_only=True)
class SyncScheduler(WorkScheduler):
    """Assigns shards to idle workers; an update consists of as many gradients as its step has shards.

    Spares have two forms:
    - repeat (`duplicate`): when all shards of the step are assigned, idle workers compute outstanding ones again, at
      most `spares` of them at once; the first result is used. The update does not depend on which worker is first.
    - replace: `spares` shards of the following steps are assigned in addition; the update uses the first results that
      arrive, and outstanding shards are assigned again, their late results discarded. Which shards form an update
      depends on time, but each is used once per epoch. When the epoch has no more shards, outstanding ones are
      repeated.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    plan: BatchPlan
    spares: int = 0
    """Number of shards that may be in progress in addition to those of an update."""
    width: int = 1
    """Shards that a worker takes at a time; more than 1 only if an update consists of its own step's shards."""
    replaces: bool = False
    """Whether the first results that arrive form the update, instead of those of its own step."""
    until: int | None = None
    """Updates after which this start ends."""
    _fresh: tuple[int, int] = (0, 0)
    _returned: list[tuple[int, int]] = field(default_factory=list)
    _results: dict[Ticket, tuple[WorkItem, int]] = field(default_factory=dict)
    _abandoned: set[int] = field(default_factory=set)

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the update, once there are as many results as its step has shards."""
        if len(_places(*self._results)) < self.plan.num_shards(self.version) or self._is_over:
            return None
        found = [self._results[ticket] for ticket in sorted(self._results, key=lambda ticket: _places(ticket)[0])]
        items, reads = zip(*found, strict=True)
        return PendingUpdate(version=self.version, items=items, reads=reads)

    def merged(self, merge: PendingUpdate) -> None:
        """Advance to the next step; outstanding results are then too late."""
        super().merged(merge)
        self._results.clear()
        self._abandon_outstanding()
        if not self.replaces or self.version % self.plan.steps_per_epoch == 0:
            self._fresh = (self.version, 0)

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Assign again all shards that were assigned at the old loss scale."""
        self._results.clear()
        self._return(*_places(*(item.ticket for item in merge.items)))
        self._abandon_outstanding()

    def remember(self) -> JsonMap:
        """Return the unused shards, and the first untouched one, if an update may contain shards of several steps."""
        if not self.replaces:
            return {}
        held = _places(*{item.ticket for item in self._outstanding()}, *self._results)
        return {"returned": sorted([*self._returned, *held]), "fresh": list(self._fresh)}

    def recall(self, remembered: JsonMap, version: int) -> None:
        """Restore the state: the remembered shards are assigned first."""
        self.version = version
        found = expect_map(remembered, {})
        step, shard = whole_numbers(found.get("fresh", [version, 0])) if self.replaces else (version, 0)
        self._fresh = (step, shard)
        returned = map(whole_numbers, found.get("returned", [])) if self.replaces else []
        self._returned = [(step, shard) for step, shard in returned]

    @property
    def _is_over(self) -> bool:
        return self.until is not None and self.version >= self.until

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - all workers are equivalent
        if self._is_over:
            return None
        out = self._outstanding()
        in_progress = len(_places(*{item.ticket for item in out}, *self._results))
        wanted = self.plan.num_shards(self.version) + (self.spares if self.replaces else 0)
        place = self._next_place()
        if place is None:
            return self._repeated(out)
        return self._pop() if in_progress < wanted else None

    def _next_place(self) -> tuple[int, int] | None:
        """Return the next shard to assign: of the step, or of the epoch if an update may mix steps."""
        if self._returned:
            return self._returned[0]
        step, shard = self._fresh
        if shard >= self.plan.num_shards(step):
            step, shard = step + 1, 0
        per_epoch = self.plan.steps_per_epoch
        end = (self.version // per_epoch + 1) * per_epoch if self.replaces else self.version + 1
        return (step, shard) if step < end else None

    def _pop(self) -> Ticket:
        """Take the next shards, all of one step."""
        taken: list[tuple[int, int]] = []
        while len(taken) < self.width and (place := self._next_place()) is not None:
            if taken and place[0] != taken[0][0]:
                break
            taken.append(place)
            if self._returned:
                self._returned.pop(0)
            else:
                self._fresh = (place[0], place[1] + 1)
        return Ticket(taken[0][0], tuple(shard for _, shard in taken))

    def _repeated(self, out: list[WorkItem]) -> Ticket | None:
        """Return the outstanding shard with the fewest workers, the first of them."""
        copies = Counter(item.ticket for item in out)
        if not copies or len(out) - len(copies) >= self.spares:
            return None
        return min(copies, key=lambda ticket: copies[ticket])

    def _outstanding(self) -> list[WorkItem]:
        return [item for item in self.running.values() if item.number not in self._abandoned]

    def _accept(self, item: WorkItem, read: int) -> None:
        if item.number in self._abandoned:
            self._abandoned.discard(item.number)
            self._discard(item)
            return
        self._results[item.ticket] = item, read
        self._abandoned.update(one.number for one in self.running.values() if one.ticket == item.ticket)

    def _abandon_outstanding(self) -> None:
        """Ignore outstanding results from now on; their shards are assigned again unless they were repetitions."""
        out = self._outstanding()
        self._return(*_places(*{item.ticket for item in out}))
        self._abandoned.update(item.number for item in out)

    def _requeue(self, item: WorkItem) -> None:
        if item.number in self._abandoned:
            self._abandoned.discard(item.number)
        elif all(other.ticket != item.ticket for other in self._outstanding()):
            self._return(*_places(item.ticket))

    def _return(self, *places: tuple[int, int]) -> None:
        self._returned = sorted([*self._returned, *places])


def _places(*tickets: Ticket) -> list[tuple[int, int]]:
    """Return (step, shard) of every shard."""
    return [(ticket.step, shard) for ticket in tickets for shard in ticket.shards]
