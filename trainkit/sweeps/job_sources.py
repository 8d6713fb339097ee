"""The jobs of a sweep, and the sources that produce them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainkit.trainer.ownership import discard_lock

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn


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


def continued(command: tuple[str, ...], folder: Path) -> tuple[tuple[str, ...], bool]:
    """Return the command of a job, which resumes a run that has begun in its folder, and whether it has.

    The lock of a job that was killed before it began is deleted: its run would attribute the folder to another one.
    """
    begun = (folder / "resolved.yaml").is_file()
    if not begun:
        discard_lock(folder / ".lock")
    resumes = any(word.startswith("resume=") for word in command)
    return (*command, "resume=auto") if begun and not resumes else command, begun


def job_return(overrides: Sequence[str], code: int | None) -> JobReturn:
    """Return the exit code of a job as Hydra's sweepers expect it; a failed job does not end a search."""
    from hydra.core.utils import JobReturn, JobStatus  # noqa: PLC0415 - for sweeps only

    done = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    done.return_value = code
    return done


class JobSource(Protocol):
    """Produces the jobs of a sweep: a list, or a search that depends on the results of ended jobs."""

    @property
    def total(self) -> int | None:
        """Number of all jobs; None if not known."""

    def next(self, free: int) -> SweepJob | None:
        """Return the next job that fits into the free slots; None if there is none until another has ended."""

    def ended(self, job: SweepJob, code: int) -> None:
        """Receive the exit code of a job after its last try; 0 also for a job that does not need to run."""

    def watch(self, job: SweepJob) -> bool:
        """Return whether a running job should stop gracefully; called about twice a second."""


class JobList:
    """Jobs that are all known in advance: of those that fit, the one with the most slots is next.

    Example:
        >>> wide, narrow = (
        ...     SweepJob(name=name, folder=Path(name), overrides=(), command=(), slots=slots)
        ...     for name, slots in (("0", 2), ("1", 1))
        ... )
        >>> source = JobList([wide, narrow])
        >>> source.next(1).name, source.next(1), source.next(2).name
        ('1', None, '0')
    """

    def __init__(self, jobs: Iterable[SweepJob]) -> None:
        self._waiting = sorted(jobs, key=lambda job: -job.slots)
        self._total = len(self._waiting)

    @property
    def total(self) -> int:
        """Number of jobs in the list."""
        return self._total

    def next(self, free: int) -> SweepJob | None:
        """Return the widest job that fits."""
        return pop_fitting(self._waiting, free)

    def ended(self, job: SweepJob, code: int) -> None:
        """Do nothing."""

    def watch(self, job: SweepJob) -> bool:  # noqa: ARG002 - the jobs of a list run to their end
        """Return False."""
        return False


def pop_fitting(jobs: list[SweepJob], free: int) -> SweepJob | None:
    """Remove the first job that fits into the free slots, and return it; None if none fits."""
    index = next((index for index, job in enumerate(jobs) if job.slots <= free), None)
    return None if index is None else jobs.pop(index)
