"""Keep track of which replicas take part in the next attempt, which are lost, and when lost ones are tried again.

A replica is lost if it causes a failure of a restarted attempt before its first step there is completed, or causes two
failures without a newer checkpoint in between. Training continues with the others, ranks renumbered from 0, as long as
`elastic.min_replicas` are left. The lost replica is tried again after `elastic.retry_s`, which doubles with each
further loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainkit.cluster.tasks import Task


@dataclass(slots=True)
class _Member:
    """One replica slot, whether it takes part in the next attempt or not."""

    task: Task
    """The task as planned; its `index` stays, its rank is assigned anew for each attempt."""
    failures: int = 0
    """Failures that it caused since the last checkpoint it took part in."""
    losses: int = 0
    """Times it was lost since then."""
    due: float | None = None
    """When a lost replica is tried again; None: it is not lost."""


class ReplicaMembership:
    """Counts the failures and losses of the replicas of a run.

    Args:
        tasks: all of them, as planned.
        min_replicas: the run does not continue with fewer; None: no replica is ever lost, however often it fails.
        retry_s: seconds until a lost replica is tried again; doubled by each further loss without a completed step.
        clock: returns monotonic seconds.

    Example:
        >>> tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(3)]
        >>> membership = ReplicaMembership(tasks, min_replicas=2)
        >>> membership.record_failure(0, at_start=True)
        'worker:0 (cpu) is lost: goes on with 2 of 3 replicas, and tries it again in 60 s.'
        >>> membership.next_members()
        ()
        >>> [(str(task), task.rank) for task in membership.tasks]
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
        self._members = [_Member(task) for task in tasks]
        self._present = list(self._members)
        self._min_replicas = min_replicas
        self._retry_s = retry_s
        self._clock = clock

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the current attempt: devices and indices as planned, ranks from 0 without gaps."""
        return tuple(replace(member.task, rank=rank) for rank, member in enumerate(self._present))

    @property
    def is_due(self) -> bool:
        """Whether a lost replica may be tried again."""
        return any(member.due is not None and member.due <= self._clock() for member in self._members)

    @property
    def at_minimum(self) -> bool:
        """Whether a further loss would leave fewer than allowed."""
        return self._min_replicas is not None and len(self._present) <= self._min_replicas

    def next_members(self) -> tuple[str, ...]:
        """Select the replicas of the next attempt: all that are not lost, and all that are due again.

        Returns:
            A line about the replicas that return.
        """
        now = self._clock()
        returning = [member for member in self._members if member.due is not None and member.due <= now]
        for member in returning:
            member.due = None
        self._present = [member for member in self._members if member.due is None]
        if not returning:
            return ()
        names = ", ".join(_name(member.task) for member in returning)
        return (f"tries {names} again: {self._counted} replicas.",)

    def clear_failures(self) -> None:
        """Reset the failure counts of the present replicas, because they have made a newer checkpoint."""
        for member in self._present:
            member.failures = member.losses = 0

    def record_failure(self, rank: int, *, at_start: bool) -> str | None:
        """Record which replica caused the end of an attempt, perhaps before the first step after its restart.

        Returns:
            One line if the replica is lost; None: the next attempt includes it.
        """
        member = self._present[rank]
        member.failures += 1
        if self._min_replicas is None or self.at_minimum or not (at_start or member.failures > 1):
            return None
        wait_s = self._retry_s * 2**member.losses
        member.losses += 1
        member.due = self._clock() + wait_s
        self._present = [other for other in self._present if other is not member]
        return (
            f"{_name(member.task)} is lost: goes on with {self._counted} replicas, and tries it again in {wait_s:g} s."
        )

    @property
    def _counted(self) -> str:
        return f"{len(self._present)} of {len(self._members)}"


def _name(task: Task) -> str:
    return f"{task} ({task.device})"
