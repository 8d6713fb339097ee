"""The desk of a replay: gradients are computed and applied as another run's record says."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness
from trainkit.strategies.parameter_server.coordinator.update_log import UpdateRecord

__all__ = ["ReplayScheduler"]


@dataclass(kw_only=True)
class ReplayScheduler(WorkScheduler):
    """Makes every gradient read the version that it read, and the updates come in the order in which they came.

    A gradient that comes before its turn waits at the servers, so any number of workers will do. An update waits until
    all that read the version before it have read.
    """

    script: Sequence[UpdateRecord]
    """The record, from version 0 on."""
    staleness: Staleness
    """Scales gradients and rates as in the recorded run; what that one dropped is not in the record."""
    until: int | None = None
    """Updates after which this start ends."""
    _to_read: dict[int, deque[Ticket]] = field(default_factory=lambda: defaultdict(deque))
    _reading: set[int] = field(default_factory=set)
    _results: dict[Ticket, WorkItem] = field(default_factory=dict)

    def pulled(self, number: int) -> None:
        """A worker has read what its errand is to be computed from."""
        self._reading.discard(number)

    def next_ready_update(self) -> PendingUpdate | None:
        """The next update of the script, once all that read the variables before it have done so."""
        if self._is_over or self._to_read[self.version] or self._reading:
            return None
        parts = self._line.parts
        if any(part.ticket not in self._results for part in parts):
            return None
        reads = tuple(part.read for part in parts)
        verdict = self.staleness.decide(self.version - min(reads))
        return PendingUpdate(
            version=self.version,
            errands=tuple(self._results[part.ticket] for part in parts),
            reads=reads,
            factor=verdict.factor,
            lr_divisor=verdict.lr_divisor,
        )

    def merged(self, merge: PendingUpdate) -> None:
        """The next line."""
        super().merged(merge)
        for errand in merge.errands:
            del self._results[errand.ticket]

    def requeue_after_overflow(self, merge: PendingUpdate) -> None:
        """Its gradients are computed again: in the record, too, all were of one version."""
        for errand in merge.errands:
            del self._results[errand.ticket]
            self._to_read[self.version].append(errand.ticket)

    def remember(self) -> dict[str, Any]:
        """Nothing: the script knows."""
        return {}

    def recall(self, remembered: Mapping[str, Any], version: int) -> None:
        """Find the place in the script.

        Raises:
            TrainingError: gradients to come were computed from variables that are gone.
        """
        del remembered
        self.version = version
        for line in self.script[version:]:
            for part in line.parts:
                if part.read < version:
                    raise TrainingError(
                        f"a replay cannot go on from step {version}: update {line.version} is made of a gradient that "
                        f"was computed at version {part.read}. Let it begin anew, with resume=null."
                    )
                self._to_read[part.read].append(part.ticket)

    @property
    def _is_over(self) -> bool:
        return self.until is not None and self.version >= self.until

    @property
    def _line(self) -> UpdateRecord:
        if self.version >= len(self.script):
            raise TrainingError(
                f"the recorded run made {len(self.script)} updates, and this one is to make more. "
                f"Use steps={len(self.script)}, or stop_at_step."
            )
        return self.script[self.version]

    def _choose(self, worker: str) -> Ticket | None:  # noqa: ARG002 - the record says what was computed, not by whom
        waiting = self._to_read[self.version]
        return waiting.popleft() if waiting and not self._is_over else None

    def next(self, worker: str) -> WorkItem | None:
        """What is to be read at this version."""
        errand = super().next(worker)
        if errand is not None:
            self._reading.add(errand.number)
        return errand

    def _accept(self, errand: WorkItem, read: int) -> None:
        self._reading.discard(errand.number)
        if read != errand.version:
            raise TrainingError(f"{errand.worker} read version {read} instead of {errand.version}")
        self._results[errand.ticket] = errand

    def _requeue(self, errand: WorkItem) -> None:
        self._reading.discard(errand.number)
        if errand.version < self.version:
            raise TrainingError(
                f"{errand.worker} is gone, and what it was to compute from version {errand.version} cannot be read "
                "again: a replay begins anew."
            )
        self._to_read[self.version].append(errand.ticket)
