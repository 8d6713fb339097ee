"""The desk of synchronous updates: a ticket is a shard of a step, and spare replicas do not wait for the slowest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.bounded_json import whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler

__all__ = ["SyncScheduler"]


@dataclass(kw_only=True)
class SyncScheduler(WorkScheduler):
    """Hands shards to whoever is free; an update is made of as many gradients as its step has shards.

    With spares, in two forms:

    - repeat (`duplicate`): when all shards of the step are handed out, idle workers compute outstanding ones again, at
      most `spares` of them at once; the first result wins. The update is the same whoever wins.
    - replace: `spares` shards of the steps to come are handed out besides; the update takes the first results that
      come, and what is still under way is handed out again, its late results thrown away. Which shards make an update
      depends on time, but each is used once an epoch. Where the epoch has no more shards, outstanding ones are
      repeated.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    plan: BatchPlan
    spares: int = 0
    """Shards that may be under way beyond those an update is made of."""
    width: int = 1
    """Shards that a worker takes at a time; more than 1 only where an update is made of its own step's."""
    replaces: bool = False
    """Whether the first results that come make the update, instead of those of its own step."""
    until: int | None = None
    """Updates after which this start ends."""
    _fresh: tuple[int, int] = (0, 0)
    _returned: list[tuple[int, int]] = field(default_factory=list)
    _results: dict[Ticket, tuple[WorkItem, int]] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)

    def next_ready_update(self) -> PendingUpdate | None:
        """The update, once there are as many results as its step has shards."""
        if len(_places(*self._results)) < self.plan.num_shards(self.version) or self._is_over:
            return None
        found = [self._results[ticket] for ticket in sorted(self._results, key=lambda ticket: _places(ticket)[0])]
        errands, reads = zip(*found, strict=True)
        return PendingUpdate(version=self.version, errands=errands, reads=reads)

    def merged(self, merge: PendingUpdate) -> None:
        """The next step is open; what is still under way comes too late."""
        super().merged(merge)
        self._results.clear()
        self._give_up()
        if not self.replaces or self.version % self.plan.steps_per_epoch == 0:
            self._fresh = (self.version, 0)

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """All that was handed out at the old loss scale is handed out again."""
        self._results.clear()
        self._return(*_places(*(errand.ticket for errand in merge.errands)))
        self._give_up()

    def remember(self) -> dict[str, Any]:
        """Where shards of several steps make an update: those that are not used yet, before the first untouched one."""
        if not self.replaces:
            return {}
        held = _places(*{errand.ticket for errand in self._outstanding()}, *self._results)
        return {"returned": sorted([*self._returned, *held]), "fresh": list(self._fresh)}

    def recall(self, remembered: Mapping[str, Any], version: int) -> None:
        """Go on with those."""
        self.version = version
        step, shard = whole_numbers(remembered.get("fresh", [version, 0])) if self.replaces else (version, 0)
        self._fresh = (step, shard)
        returned = map(whole_numbers, remembered.get("returned", [])) if self.replaces else []
        self._returned = [(step, shard) for step, shard in returned]

    @property
    def _is_over(self) -> bool:
        return self.until is not None and self.version >= self.until

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - all alike
        if self._is_over:
            return None
        out = self._outstanding()
        under_way = len(_places(*{errand.ticket for errand in out}, *self._results))
        wanted = self.plan.num_shards(self.version) + (self.spares if self.replaces else 0)
        place = self._next_place()
        if place is None:
            return self._repeated(out)
        return self._pop() if under_way < wanted else None

    def _next_place(self) -> tuple[int, int] | None:
        """The next shard to hand out: of the step, or of the epoch where shards of several steps make an update."""
        if self._returned:
            return self._returned[0]
        step, shard = self._fresh
        if shard >= self.plan.num_shards(step):
            step, shard = step + 1, 0
        per_epoch = self.plan.steps_per_epoch
        end = (self.version // per_epoch + 1) * per_epoch if self.replaces else self.version + 1
        return (step, shard) if step < end else None

    def _pop(self) -> Ticket:
        """The next shards, all of one step."""
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
        """The outstanding shard with the fewest workers at it, the first of them."""
        copies = Counter(errand.ticket for errand in out)
        if not copies or len(out) - len(copies) >= self.spares:
            return None
        return min(copies, key=lambda ticket: copies[ticket])

    def _outstanding(self) -> list[WorkItem]:
        return [errand for errand in self.running.values() if errand.number not in self._given_up]

    def _accept(self, errand: WorkItem, read: int) -> None:
        if errand.number in self._given_up:
            self._given_up.discard(errand.number)
            self._discard(errand)
            return
        self._results[errand.ticket] = errand, read
        self._given_up.update(one.number for one in self.running.values() if one.ticket == errand.ticket)

    def _give_up(self) -> None:
        """Wait no longer for what is under way; it is handed out again where it was not a repetition."""
        out = self._outstanding()
        self._return(*_places(*{errand.ticket for errand in out}))
        self._given_up.update(errand.number for errand in out)

    def _requeue(self, errand: WorkItem) -> None:
        if errand.number in self._given_up:
            self._given_up.discard(errand.number)
        elif all(other.ticket != errand.ticket for other in self._outstanding()):
            self._return(*_places(errand.ticket))

    def _return(self, *places: tuple[int, int]) -> None:
        self._returned = sorted([*self._returned, *places])


def _places(*tickets: Ticket) -> list[tuple[int, int]]:
    """(step, shard) of every shard."""
    return [(ticket.step, shard) for ticket in tickets for shard in ticket.shards]
