"""The scheduler of a replay: gradients are computed and applied as recorded by another run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainkit.errors import TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import JsonMap
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness
from trainkit.strategies.parameter_server.coordinator.update_log import UpdateRecord


@dataclass(kw_only=True)
class ReplayScheduler(WorkScheduler):
    """Makes every gradient read its recorded version, and applies the updates in their recorded order.

    A gradient that arrives early waits at the servers, so any number of workers is possible. An update waits until all
    work items that read the version before it have read it.
    """

    script: Sequence[UpdateRecord]
    """The record, from version 0 on."""
    staleness: Staleness
    """Scales gradients and rates as in the recorded run; dropped gradients are not in the record."""
    until: int | None = None
    """Updates after which this start ends."""
    _to_read: dict[int, deque[Ticket]] = field(default_factory=lambda: defaultdict(deque))
    _reading: set[int] = field(default_factory=set)
    _results: dict[Ticket, WorkItem] = field(default_factory=dict)

    def pulled(self, number: int) -> None:
        """Record that a worker has read the variables for a work item."""
        self._reading.discard(number)

    def next_ready_update(self) -> PendingUpdate | None:
        """Return the next recorded update, once all work items that read the current variables have read them."""
        if self._is_over or self._to_read[self.version] or self._reading:
            return None
        gradients = self._line.parts
        if any(gradient.ticket not in self._results for gradient in gradients):
            return None
        reads = tuple(gradient.read for gradient in gradients)
        decision = self.staleness.decide(self.version - min(reads))
        return PendingUpdate(
            version=self.version,
            items=tuple(self._results[gradient.ticket] for gradient in gradients),
            reads=reads,
            factor=decision.factor,
            lr_divisor=decision.lr_divisor,
        )

    def merged(self, merge: PendingUpdate) -> None:
        """Advance to the next record."""
        super().merged(merge)
        for item in merge.items:
            del self._results[item.ticket]

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Compute the gradients again: in the record, all were of one version as well."""
        for item in merge.items:
            del self._results[item.ticket]
            self._to_read[self.version].append(item.ticket)

    def remember(self) -> JsonMap:
        """Return nothing: the record determines the state."""
        return {}

    def recall(self, remembered: JsonMap, version: int) -> None:
        """Restore the position in the record.

        Raises:
            TrainingError: later gradients were computed from variables that no longer exist.
        """
        del remembered
        self.version = version
        for line in self.script[version:]:
            for gradient in line.parts:
                if gradient.read < version:
                    raise TrainingError(
                        f"a replay cannot continue from step {version}: update {line.version} uses a gradient that "
                        f"was computed at version {gradient.read}. Start it from the beginning with resume=null."
                    )
                self._to_read[gradient.read].append(gradient.ticket)

    @property
    def _is_over(self) -> bool:
        return self.until is not None and self.version >= self.until

    @property
    def _line(self) -> UpdateRecord:
        if self.version >= len(self.script):
            raise TrainingError(
                f"the recorded run made {len(self.script)} updates, and this run needs more. "
                f"Use steps={len(self.script)}, or stop_at_step."
            )
        return self.script[self.version]

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - the record names no workers
        waiting = self._to_read[self.version]
        return waiting.popleft() if waiting and not self._is_over else None

    def next(self, worker: str) -> WorkItem | None:
        """Return the next work item that reads the current version."""
        item = super().next(worker)
        if item is not None:
            self._reading.add(item.number)
        return item

    def _accept(self, item: WorkItem, read: int) -> None:
        self._reading.discard(item.number)
        if read != item.version:
            raise TrainingError(f"{item.worker} read version {read} instead of {item.version}")
        self._results[item.ticket] = item

    def _requeue(self, item: WorkItem) -> None:
        self._reading.discard(item.number)
        if item.version < self.version:
            raise TrainingError(
                f"{item.worker} was lost, and version {item.version}, which it needed, cannot be read again: start "
                f"the replay from the beginning."
            )
        self._to_read[self.version].append(item.ticket)
