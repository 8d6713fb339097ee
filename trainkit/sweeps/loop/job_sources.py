"""What a sweep runs: jobs, and the sources they come from."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

__all__ = ["JobList", "JobSource", "SweepJob", "free_folder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep."""

    name: str
    """What the leaderboard calls it: its folder, relative to the sweep's."""
    folder: Path
    """Where its run goes; where it holds a run already, that run goes on."""
    overrides: tuple[str, ...]
    """All arguments of this run, without secrets."""
    command: tuple[str, ...]
    """The process to start, without secrets."""
    slots: int = 1
    """How many it takes."""
    config: str = ""
    """A hash of every key that is not cosmetic: with the same one, a result need not be made again."""
    label: str = ""
    """What sets it apart from the others, in a line; empty: its name does."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of its environment that hold what its command line lacks; in no file."""


class JobSource(Protocol):
    """Where the jobs of a sweep come from: a list of them, or a search that learns from those that have ended."""

    @property
    def total(self) -> int | None:
        """Jobs in all; None where that is not known."""

    @property
    def exhausted(self) -> bool:
        """Whether no further job will come, whatever those that run will give."""

    def next(self) -> SweepJob | None:
        """The next job to run; None: none until another has ended. Asked when a slot is free."""

    def ended(self, job: SweepJob, code: int) -> None:
        """A job has ended, after the last of its tries; what it gave stands in its folder.

        Args:
            job: as `next` gave it.
            code: its exit code; 0 also for one that need not be run, because its result is there already.
        """

    def watch(self, job: SweepJob) -> bool:
        """Whether to stop a job that runs, in good order; asked about twice a second."""


class JobList:
    """Jobs that are all known beforehand; those that take most slots come first, so that the last ones fill the gaps.

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
        """Its length."""
        return self._total

    @property
    def exhausted(self) -> bool:
        """Whether all have been handed out."""
        return not self._waiting

    def next(self) -> SweepJob | None:
        """The next one."""
        return self._waiting.popleft() if self._waiting else None

    def ended(self, job: SweepJob, code: int) -> None:
        """Nothing follows from it."""

    def watch(self, job: SweepJob) -> bool:  # noqa: ARG002 - a list has no opinion
        """Never."""
        return False


def free_folder(folder: Path, taken: Iterable[Path] = ()) -> Path:
    """The folder, or the same with -2, -3 ... where it exists or is taken."""
    others = set(taken)
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not candidate.exists() and candidate not in others:
            return candidate
    raise AssertionError  # count() never ends
