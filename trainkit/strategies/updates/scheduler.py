"""The scheduler of updates: which work a worker gets, and which gradients make the next update.

It has no threads, sockets and tensors: workers are threads of this process (`central_storage`), or processes
(`parameter_server`). A scheduler assigns work to an idle worker (`next`), is told of its gradient (`report`) or of its
loss (`leave`), and returns the next update (`next_ready_update`), which the executor makes and confirms (`merged`).
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from itertools import accumulate, count
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from trainkit.errors import CheckpointError, Problem, TrainingError
from trainkit.fields import at_least, maths, unit
from trainkit.files import expect_map, naming, open_regular, parse_json, read_lines, whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import JsonMap, Status

Policy = Literal["accept", "drop", "scale", "lr", "bound"]
"""Policies for staleness: the number of updates since the variables of a gradient were read."""
BOUNDED: Final = ("drop", "bound")
"""Policies that need a bound; the other policies ignore it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The way in which a gradient is applied."""

    takes: bool = True
    """Whether the gradient is applied; else its shards are assigned again."""
    factor: float = 1.0
    """Factor of the gradient."""
    lr_divisor: float = 1.0
    """Divisor of the learning rate of its update."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """The treatment of stale gradients, computed from variables that other updates have changed meanwhile.

    | policy | a gradient of staleness s                                          | source                             |
    |--------|--------------------------------------------------------------------|------------------------------------|
    | accept | is applied unchanged                                               | Dean et al. 2012, section 4.1      |
    | drop   | is discarded if s > bound; its shards are assigned again           |                                    |
    | scale  | is multiplied by 1 / (1 + s): not for Adam, invariant to scale     |                                    |
    | lr     | is applied at the learning rate divided by max(1, s)               | Zhang et al. 2015, 1511.05950 (5)  |
    | bound  | is applied; a worker over bound updates ahead of the slowest waits | Ho et al. 2013, section 2          |

    Example:
        >>> Staleness(policy="scale").decide(3).factor, Staleness(policy="lr").decide(3).lr_divisor
        (0.25, 3.0)
        >>> Staleness(policy="drop", bound=2).decide(3).takes
        False
    """

    policy: Annotated[Policy, maths(neutral="accept")] = "accept"
    """`accept`, `drop` above the bound, `scale` by 1/(1+s), `lr` divided by s, or `bound`: fast workers wait."""
    bound: Annotated[int | None, maths(neutral=None), at_least(0), unit("steps")] = None
    """Number of updates; for `drop` and `bound`."""

    def problems(self) -> list[Problem]:
        """Return problems: a policy without its bound, or a bound without a policy that uses it."""
        rule = None
        if self.policy in BOUNDED and self.bound is None:
            rule = f"is needed by strategy.staleness.policy={self.policy}. Give a number of updates."
        if self.policy not in BOUNDED and self.bound is not None:
            rule = f"has no effect with strategy.staleness.policy={self.policy}. Use drop or bound, or leave it out."
        return [] if rule is None else [Problem(key="strategy.staleness.bound", value=self.bound, rule=rule)]

    def decide(self, staleness: int) -> Decision:
        """Decide how a gradient is applied whose variables were updated `staleness` times since they were read."""
        if self.policy == "drop":
            return Decision(takes=staleness <= (self.bound or 0))
        if self.policy == "scale":
            return Decision(factor=1.0 / (1 + staleness))
        return Decision(lr_divisor=float(max(1, staleness))) if self.policy == "lr" else Decision()

    def may_begin(self, clock: int, slowest: int) -> bool:
        """Return whether a worker may start its next step."""
        return self.policy != "bound" or clock - slowest <= (self.bound or 0)


def staleness_summary(counts: Mapping[int, int]) -> dict[str, Any]:
    """Return the staleness of the updates of a run, as recorded in result.json.

    Example:
        >>> staleness_summary({0: 1, 1: 8, 4: 1})
        {'mean': 1.2, 'p95': 4, 'counts': {'0': 1, '1': 8, '4': 1}}
    """
    total, order = sum(counts.values()), sorted(counts)
    reached = accumulate(counts[number] for number in order)
    return {
        "mean": sum(number * count for number, count in counts.items()) / total,
        "p95": next(number for number, cumulative in zip(order, reached, strict=True) if cumulative >= 0.95 * total),
        "counts": {str(number): counts[number] for number in order},
    }


def settled(scale: LossScale, used: float, status: Status, *, leaves_out: bool) -> tuple[Status, LossScale]:
    """Return the status of an update, and the loss scale after it.

    A gradient is unscaled by the loss scale that it was computed with, so the scale may change meanwhile. An overflow
    at a scale that is no longer used says nothing about the current one: the step is computed again, with that one.

    Args:
        scale: the loss scale that the next work item gets.
        used: the loss scale of the gradient.
        status: whether the gradient was applied, overflowed (`retry`), or is not finite at any scale (`skipped`).
        leaves_out: whether a step that is not finite is skipped after many overflows.

    Example:
        >>> from trainkit.numerics.precision import Precision
        >>> scale = Precision(value="fp16_mixed", initial_scale=8.0).loss_scale()
        >>> [settled(scale, used, Status.retry, leaves_out=False)[1].scale for used in (8.0, 16.0)]
        [4.0, 8.0]
    """
    if status is Status.retry and used > scale.scale:
        return status, scale
    if status is Status.retry and (scale.may_retry or not leaves_out):
        return status, scale.after(overflow=True)
    return (status, scale.after(overflow=False)) if status is Status.applied else (Status.skipped, scale.after_skip())


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """A ticket that is assigned to a worker."""

    number: int = 0
    """Number of the item since this start; part of the name of its gradient."""
    worker: str
    ticket: Ticket
    version: int
    """Version of the variables (number of updates) when it was assigned; once reported, of those that were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingUpdate:
    """The gradients of an update.

    A line of the log is `{"version":12,"of":[[13,[0,1],11,"worker:1"]]}`: the update after the 12th was made of the
    shards 0 and 1 of step 13, computed by worker:1 from variables of version 11.

    Example:
        >>> text = '{"version":12,"of":[[13,[0,1],11,"worker:1"]]}'
        >>> update = PendingUpdate.parse(text)
        >>> update.staleness, update.text() == text
        (1, True)
    """

    version: int
    """Number of updates before this one."""
    items: tuple[WorkItem, ...]
    """The work items whose gradients are summed, in the order of their steps and shards."""
    decision: Decision = Decision()
    """The way in which a stale gradient is applied."""

    @property
    def staleness(self) -> int:
        """Number of updates between the oldest read and this one."""
        return self.version - min(item.version for item in self.items)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The tickets of its items."""
        return tuple(item.ticket for item in self.items)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse a line of the log."""
        line = expect_map(parse_json(text), {"version": int, "of": list})
        items = []
        for step, shards, read, worker in line["of"]:
            whole_numbers([step, read])
            if not isinstance(worker, str) or read > line["version"]:
                raise ValueError("the name of a worker is not text, or it has read a later version")
            items.append(WorkItem(worker=worker, ticket=Ticket(step, tuple(whole_numbers(shards))), version=read))
        return cls(version=line["version"], items=tuple(items))

    def text(self) -> str:
        """Return the line of the log."""
        parts = [[item.ticket.step, list(item.ticket.shards), item.version, item.worker] for item in self.items]
        return json.dumps({"version": self.version, "of": parts}, separators=(",", ":"))


@dataclass(kw_only=True)
class WorkScheduler(ABC):
    """The state common to all schedulers: the workers, their work items, and the gradients that have arrived."""

    staleness: Staleness = Staleness()
    """The treatment of stale gradients."""
    version: int = 0
    """Version of the variables: their number of updates."""
    until: int | None = None
    """Updates after which this start ends."""
    running: dict[int, WorkItem] = field(default_factory=dict)
    """Work items by number, in the order in which they were assigned, whose gradients may be used."""
    late: Counter[str] = field(default_factory=Counter)
    """Number of discarded gradients by worker."""
    _again: list[Ticket] = field(default_factory=list)
    """Tickets that are assigned before any others, in their order."""
    _arrived: dict[Ticket, WorkItem] = field(default_factory=dict)
    """Gradients that wait for their update, in the order of their arrival."""
    _clocks: dict[str, int] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def recall(self, remembered: JsonMap, version: int, until: int | None) -> None:
        """Start at a version, again after a rollback, with the work that `remember` returned."""
        del remembered
        self.version, self.until, self._again = version, until, []
        self.running.clear()
        self._arrived.clear()
        self._clocks = dict.fromkeys(self._clocks, 0)

    def remember(self) -> JsonMap:
        """Return the assigned and not applied work for a checkpoint, as JSON."""
        return {}

    def join(self, worker: str) -> None:
        """Add a worker; its update count starts at that of the slowest worker."""
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def leave(self, worker: str) -> None:
        """Remove a worker and assign its work items again, unless another worker computes the same."""
        self._clocks.pop(worker, None)
        for item in [item for item in self.running.values() if item.worker == worker]:
            del self.running[item.number]
            if all(other.ticket != item.ticket for other in self.running.values()):
                self._requeue(item.ticket)

    def next(self, worker: str) -> WorkItem | None:
        """Return the next work item of an idle worker; None: it must wait for an update, or for the end."""
        ticket = self._choose(worker)
        if ticket is None:
            return None
        item = WorkItem(number=next(self._numbers), worker=worker, ticket=ticket, version=self.version)
        self.running[item.number] = item
        return item

    def report(self, number: int, worker: str, read: int) -> bool:
        """Record that a gradient, computed after `read` updates, is there; return False if it is to be discarded."""
        item = self.running.pop(number, None)
        if item is None or not self.staleness.decide(self.version - read).takes:
            self.late[worker] += 1
            if item is not None:
                self._requeue(item.ticket)
            return False
        self._arrived[item.ticket] = replace(item, version=read)
        self.running = {n: other for n, other in self.running.items() if other.ticket != item.ticket}
        return True

    @abstractmethod
    def next_ready_update(self) -> PendingUpdate | None:
        """Return the next update, once all its gradients have arrived; it is then made, or scheduled again."""

    def merged(self, update: PendingUpdate) -> None:
        """Record that the update was made, or skipped by policy: the version advances."""
        for item in update.items:
            if item.worker in self._clocks:
                self._clocks[item.worker] += 1
        self.version += 1

    def requeue_after_overflow(self, update: PendingUpdate) -> None:
        """Assign the shards of an overflowed update again, before any others."""
        self._requeue(*update.tickets)

    @abstractmethod
    def _choose(self, worker: str) -> Ticket | None:
        """Choose the next ticket for a worker."""

    def _requeue(self, *tickets: Ticket) -> None:
        self._again = sorted([*self._again, *tickets], key=_order)

    def _update(self, tickets: Iterable[Ticket]) -> PendingUpdate:
        """Return the update of gradients that have arrived."""
        update = PendingUpdate(version=self.version, items=tuple(map(self._arrived.pop, tickets)))
        return replace(update, decision=self.staleness.decide(update.staleness))

    def _in_progress(self) -> list[Ticket]:
        """Return the tickets that are assigned, or whose gradients wait."""
        return [*self._arrived, *dict.fromkeys(item.ticket for item in self.running.values())]

    @property
    def _is_over(self) -> bool:
        return self.until is not None and self.version >= self.until


def _order(ticket: Ticket) -> tuple[int, tuple[int, ...]]:
    return ticket.step, ticket.shards


def _shards_of(tickets: Iterable[Ticket]) -> list[tuple[int, int]]:
    """Return (step, shard) of every shard."""
    return [(ticket.step, shard) for ticket in tickets for shard in ticket.shards]


@dataclass(kw_only=True)
class AsyncScheduler(WorkScheduler):
    """Assigns whole steps to idle workers, and makes an update of each gradient when it arrives.

    With one worker, and in the first `warmup_steps`, this is the training of one device: a gradient is computed only
    after the previous one has been applied.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD, warm starting).
    """

    plan: BatchPlan
    warmup_steps: int = 0
    """Updates at the beginning during which one gradient at a time is computed."""
    _next: int = 0

    def recall(self, remembered: JsonMap, version: int, until: int | None) -> None:
        """Restore the state: the remembered steps are assigned first."""
        super().recall(remembered, version, until)
        steps = whole_numbers(remembered.get("handed_out", []))
        self._requeue(*map(self._whole, steps))
        self._next = version + len(steps)

    def remember(self) -> JsonMap:
        """Return the steps that were assigned and are not applied."""
        return {"handed_out": sorted(ticket.step for ticket in [*self._again, *self._in_progress()])}

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the update of the gradient that arrived first."""
        return self._update(list(self._arrived)[:1]) if self._arrived else None

    def _choose(self, worker: str) -> Ticket | None:
        if self.version < self.warmup_steps and self.running:
            return None
        if not self.staleness.may_begin(self._clocks[worker], min(self._clocks.values())):
            return None
        if self._again:
            return self._again.pop(0)
        if self.until is not None and self._next >= self.until:
            return None
        self._next += 1
        return self._whole(self._next - 1)

    def _whole(self, step: int) -> Ticket:
        return Ticket(step, tuple(range(self.plan.num_shards(step))))


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
    _fresh: tuple[int, int] = (0, 0)
    """The first shard that was never assigned."""

    def recall(self, remembered: JsonMap, version: int, until: int | None) -> None:
        """Restore the state: the remembered shards are assigned first."""
        super().recall(remembered, version, until)
        state = expect_map(remembered, {}) if self.replaces else {}
        step, shard = whole_numbers(state.get("fresh", [version, 0]))
        self._fresh = (step, shard)
        self._requeue(*(Ticket(step, (shard,)) for step, shard in map(whole_numbers, state.get("returned", []))))

    def remember(self) -> JsonMap:
        """Return the unused shards, and the first untouched one, if an update may contain shards of several steps."""
        if not self.replaces:
            return {}
        return {"returned": sorted(_shards_of([*self._again, *self._in_progress()])), "fresh": list(self._fresh)}

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the update, once there are as many results as its step has shards."""
        if self._is_over or len(_shards_of(self._arrived)) < self.plan.num_shards(self.version):
            return None
        return self._update(sorted(self._arrived, key=_order))

    def merged(self, update: PendingUpdate) -> None:
        """Advance to the next step; outstanding results are then too late."""
        super().merged(update)
        self._abandon()
        if not self.replaces or self.version % self.plan.steps_per_epoch == 0:
            self._fresh = (self.version, 0)

    def requeue_after_overflow(self, update: PendingUpdate) -> None:
        """Assign again all shards that were assigned at the old loss scale."""
        super().requeue_after_overflow(update)
        self._abandon()

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - all workers are equivalent
        if self._is_over:
            return None
        ticket = self._again[0] if self._again else self._untouched()
        if ticket is None:
            return self._repeated()
        if len(_shards_of(self._in_progress())) >= self.plan.num_shards(self.version) + self.spares * self.replaces:
            return None
        if self._again:
            return self._again.pop(0)
        self._fresh = (ticket.step, ticket.shards[-1] + 1)
        return ticket

    def _untouched(self) -> Ticket | None:
        """Return the next shards that were never assigned: of the step, or of the epoch if an update may mix steps."""
        step, shard = self._fresh
        if shard >= self.plan.num_shards(step):
            step, shard = step + 1, 0
        per_epoch = self.plan.steps_per_epoch
        end = (self.version // per_epoch + 1) * per_epoch if self.replaces else self.version + 1
        shards = range(shard, min(shard + self.width, self.plan.num_shards(step)))
        return Ticket(step, tuple(shards)) if step < end else None

    def _repeated(self) -> Ticket | None:
        """Return the outstanding shard with the fewest workers, the first of them."""
        copies = Counter(item.ticket for item in self.running.values())
        if not copies or len(self.running) - len(copies) >= self.spares:
            return None
        return min(copies, key=lambda ticket: copies[ticket])

    def _abandon(self) -> None:
        """Ignore outstanding results from now on, and assign their shards again."""
        self._requeue(*{item.ticket for item in self.running.values()})
        self.running.clear()


@dataclass(kw_only=True)
class ReplayScheduler(WorkScheduler):
    """Makes every gradient read its recorded version, and applies the updates in their recorded order.

    A gradient that is early waits, so any number of workers is possible. An update waits until all gradients of the
    version before it have been computed. Dropped gradients are not in the record.
    """

    script: Sequence[PendingUpdate]
    """The record, from version 0 on."""
    _to_read: dict[int, list[Ticket]] = field(default_factory=dict)
    """Tickets by the later version that they read."""

    def recall(self, remembered: JsonMap, version: int, until: int | None) -> None:
        """Restore the position in the record.

        Raises:
            TrainingError: later gradients were computed from variables that no longer exist.
        """
        super().recall(remembered, version, until)
        self._to_read = defaultdict(list)
        for line in self.script[version:]:
            for item in line.items:
                if item.version < version:
                    raise TrainingError(
                        f"a replay cannot continue from step {version}: update {line.version} uses a gradient that "
                        f"was computed at version {item.version}. Start it from the beginning with resume=null."
                    )
                self._to_read[item.version].append(item.ticket)
        self._requeue(*self._to_read[version])

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the next recorded update, once all gradients of the current version are there."""
        if self._is_over or self._again or self.running:
            return None
        if self.version >= len(self.script):
            raise TrainingError(
                f"the recorded run made {len(self.script)} updates, and this run needs more. "
                f"Use steps={len(self.script)}, or stop_at_step."
            )
        return self._update(self.script[self.version].tickets)

    def merged(self, update: PendingUpdate) -> None:
        """Advance to the next version, and assign what has read it."""
        super().merged(update)
        self._requeue(*self._to_read[self.version])

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - the record may name other workers
        return self._again.pop(0) if self._again and not self._is_over else None


FILE: Final = "updates.jsonl"
"""Name of the log in the run folder."""


class UpdateLog:
    """Writes the log of a run's updates, which accounts for every sample, and which a replay follows.

    Args:
        path: the file, whose lines after the checkpoint that is continued are removed; None: nothing is written.
        version: the version of that checkpoint.
    """

    def __init__(self, path: Path | None, version: int) -> None:
        earlier = read_record(path) if path is not None and path.exists() else ()
        updates = [update for update in earlier if update.version < version]
        self.staleness = Counter(update.staleness for update in updates)
        """Number of updates by staleness, with those of earlier starts."""
        self._path = path or Path(os.devnull)
        with naming(self._path):
            binary = self._path.open("wb") if path is None else open_regular(path, "wb")
            self._file = TextIOWrapper(binary, encoding="utf-8")
            self._file.writelines(f"{update.text()}\n" for update in updates)

    def note(self, update: PendingUpdate) -> None:
        """Append an update."""
        self.staleness[update.staleness] += 1
        with naming(self._path):
            self._file.write(f"{update.text()}\n")

    def flush(self) -> None:
        """Flush the file before a checkpoint, so that no checkpoint contains more updates than the log."""
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()


def read_record(path: Path) -> Iterator[PendingUpdate]:
    """Yield the updates of a log; a truncated last line is skipped.

    Raises:
        CheckpointError: a line is not an update.
    """
    for number, text in enumerate(read_lines(path), start=1):
        try:
            yield PendingUpdate.parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}:{number} is not an update of a run: {error}") from error
