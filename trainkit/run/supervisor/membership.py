"""The roster: which replicas of a run take part in its next attempt, which are lost, and when those are tried again.

A replica is lost that is at fault in a restart before its first step there is done, or twice without a newer
checkpoint in between. Training goes on with the others, ranks renumbered from 0, as long as `elastic.min_replicas` of
them are left. `elastic.retry_s` later it is tried again, and after each further loss twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainkit.cluster.tasks import Task

__all__ = ["ReplicaMembership"]


@dataclass(slots=True)
class _Member:
    """Where a replica lives, whether it does or not."""

    task: Task
    """As planned; `index` stays, the rank is that of the roster."""
    failures: int = 0
    """Failures that were its fault since a newer checkpoint was made with it."""
    losses: int = 0
    """Times it was lost since then."""
    due: float | None = None
    """The moment from which a lost one is tried again; None: it is not lost."""


class ReplicaMembership:
    """Keeps count of the replicas of a run.

    Args:
        tasks: all of them, as planned.
        min_replicas: fewer than these do not go on; None: a replica is waited for, however often it fails.
        retry_s: seconds until a lost replica is tried again; doubled by each loss that follows without a step done.
        clock: seconds that only rise.

    Example:
        >>> tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(3)]
        >>> roster = ReplicaMembership(tasks, min_replicas=2)
        >>> roster.record_failure(0, at_start=True)
        'worker:0 (cpu) is lost: goes on with 2 of 3 replicas, and tries it again in 60 s.'
        >>> roster.next_members()
        ()
        >>> [(str(task), task.rank) for task in roster.tasks]
        [('worker:1', 0), ('worker:2', 1)]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        min_replicas: int | None = None,
        retry_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = [_Member(task) for task in tasks]
        self._present = list(self._places)
        self._min_replicas = min_replicas
        self._retry_s = retry_s
        self._clock = clock

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Those of the current attempt: devices and indices as planned, ranks from 0 without gaps."""
        return tuple(replace(place.task, rank=rank) for rank, place in enumerate(self._present))

    @property
    def is_due(self) -> bool:
        """Whether a lost replica may be tried again."""
        return any(place.due is not None and place.due <= self._clock() for place in self._places)

    @property
    def at_minimum(self) -> bool:
        """Whether a further loss would leave fewer than allowed."""
        return self._min_replicas is not None and len(self._present) <= self._min_replicas

    def next_members(self) -> tuple[str, ...]:
        """Call up the next attempt: all that are not lost, and those that are due again.

        Returns:
            A line for those that return.
        """
        now = self._clock()
        returning = [place for place in self._places if place.due is not None and place.due <= now]
        for place in returning:
            place.due = None
        self._present = [place for place in self._places if place.due is None]
        if not returning:
            return ()
        names = ", ".join(_name(place.task) for place in returning)
        return (f"tries {names} again: {self._counted} replicas.",)

    def clear_failures(self) -> None:
        """A newer checkpoint was made by those present: what was held against them is forgotten."""
        for place in self._present:
            place.failures = place.losses = 0

    def record_failure(self, rank: int, *, at_start: bool) -> str | None:
        """Note who was at fault for the end of an attempt.

        Args:
            rank: in that attempt.
            at_start: whether it was started again and failed before its first step was done.

        Returns:
            One line if the replica is lost; None: the next attempt is with it.
        """
        place = self._present[rank]
        place.failures += 1
        if self._min_replicas is None or self.at_minimum or not (at_start or place.failures > 1):
            return None
        wait_s = self._retry_s * 2**place.losses
        place.losses += 1
        place.due = self._clock() + wait_s
        self._present = [other for other in self._present if other is not place]
        return (
            f"{_name(place.task)} is lost: goes on with {self._counted} replicas, and tries it again in {wait_s:g} s."
        )

    @property
    def _counted(self) -> str:
        return f"{len(self._present)} of {len(self._places)}"


def _name(task: Task) -> str:
    return f"{task} ({task.device})"
