"""The jobs of a sweep, and the sources that produce them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep."""

    name: str
    """Name on the leaderboard: its folder, relative to that of the sweep."""
    folder: Path
    """The folder of its run; an existing run is resumed."""
    overrides: tuple[str, ...]
    """All arguments of this run."""
    command: tuple[str, ...]
    """The command of its process."""
    slots: int = 1
    """Number of slots that the job takes."""
    config: str = ""
    """A hash of every key that is not cosmetic: jobs with the same hash have the same result."""
    label: str = ""
    """The arguments that distinguish the job from the others, in one line; empty: only its name identifies it."""


class JobSource(Protocol):
    """Produces the jobs of a sweep: a list, or a search that depends on the results of ended jobs."""

    @property
    def total(self) -> int | None:
        """Number of all jobs; None if not known."""

    @property
    def exhausted(self) -> bool:
        """Whether no further job will come, independent of the results of the running ones."""

    def next(self) -> SweepJob | None:
        """Return the next job to run; None if there is none until another has ended. Called when a slot is free."""

    def ended(self, job: SweepJob, code: int) -> None:
        """Receive the exit code of a job after its last try; 0 also for a job that does not need to run."""

    def watch(self, job: SweepJob) -> bool:
        """Return whether a running job should stop gracefully; called about twice a second."""


class JobList:
    """Jobs that are all known in advance, those with the most slots first, so that small jobs fill the gaps.

    Example:
        >>> wide, narrow = (
        ...     SweepJob(name=name, folder=Path(name), overrides=(), command=(), slots=slots)
        ...     for name, slots in (("0", 2), ("1", 1))
        ... )
        >>> source = JobList([narrow, wide])
        >>> source.next().name, source.next().name, source.exhausted
        ('0', '1', True)
    """

    def __init__(self, jobs: Iterable[SweepJob]) -> None:
        self._waiting = deque(sorted(jobs, key=lambda job: -job.slots))
        self._total = len(self._waiting)

    @property
    def total(self) -> int:
        """Number of jobs in the list."""
        return self._total

    @property
    def exhausted(self) -> bool:
        """Whether every job was returned by `next`."""
        return not self._waiting

    def next(self) -> SweepJob | None:
        """Return the next job."""
        return self._waiting.popleft() if self._waiting else None

    def ended(self, job: SweepJob, code: int) -> None:
        """Do nothing."""

    def watch(self, job: SweepJob) -> bool:  # noqa: ARG002 - the jobs of a list run to their end
        """Return False."""
        return False
