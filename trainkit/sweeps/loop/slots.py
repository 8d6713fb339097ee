"""Assign slots, the GPUs or cores of this machine, to jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainkit.cluster.host import MEMORY_SHARE, VISIBLE, mig_instances
from trainkit.config.sections import SweepConfig as Settings
from trainkit.errors import ConfigError, Problem

_THREADS: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLease:
    """The slots assigned to one job."""

    places: tuple[int, ...]
    """Numbers of the devices."""
    environ: Mapping[str, str]
    """Environment variables that make these devices visible to the job, and no others."""


class Slots:
    """Assigns slots to jobs, and takes them back: the named GPUs, or shares of the cores.

    Cores are not pinned: two sweeps on one machine would pin their jobs to the same cores. The number of threads limits
    each process of a job to its share.

    Example:
        >>> slots = Slots(gpus=["0", "1", "2"], count=3, threads=4)
        >>> slots.take(2).environ["CUDA_VISIBLE_DEVICES"], slots.take(1).places, slots.free
        ('0,1', (2,), 0)
    """

    def __init__(
        self,
        *,
        count: int,
        gpus: Sequence[str] = (),
        jobs_per_device: int = 1,
        threads: int | None = None,
        key: str = "sweep.slots",
    ) -> None:
        self._gpus = tuple(gpus)[:count]
        self._room = [jobs_per_device] * count
        self._threads, self._key = threads, key
        self.jobs_per_device = jobs_per_device

    @classmethod
    def of(cls, settings: Settings, *, num_gpus: int, num_cores: int, environ: Mapping[str, str]) -> Slots:
        """Return the slots of this machine that the config requests.

        Raises:
            ConfigError: more slots than the machine has, or an option without effect here.
        """
        wanted: int = 0 if settings.slots == "auto" else settings.slots
        given = environ.get(_THREADS, "")
        threads = int(given) if given.isdecimal() and int(given) else None
        if problems := _problems(settings, num_gpus):
            raise ConfigError(problems)
        wanted = wanted or num_gpus or max(1, num_cores // (threads or 1))
        share = threads or max(1, num_cores // (wanted * settings.jobs_per_device))
        names = _names(environ, num_gpus)
        return cls(count=wanted, gpus=names, jobs_per_device=settings.jobs_per_device, threads=share)

    @property
    def count(self) -> int:
        """Number of devices: the largest number of slots of one job."""
        return len(self._room)

    @property
    def total(self) -> int:
        """Number of single-slot jobs that fit."""
        return self.count * self.jobs_per_device

    @property
    def in_use(self) -> int:
        """Number of these places that are taken."""
        return self.total - sum(self._room)

    @property
    def free(self) -> int:
        """Largest number of slots that a job can get now."""
        return sum(room > 0 for room in self._room)

    @property
    def on_gpus(self) -> bool:
        """Whether slots are GPUs."""
        return bool(self._gpus)

    @property
    def threads(self) -> Mapping[str, str]:
        """The environment variable that sets the number of threads of a process."""
        return {} if self._threads is None else {_THREADS: str(self._threads)}

    def take(self, wanted: int) -> SlotLease:
        """Assign slots to a job, on the devices with the most free slots.

        Raises:
            ValueError: there are not enough free slots.
        """
        if wanted > self.free:
            raise ValueError(f"{wanted} slots are requested, and {self.free} are free")
        roomiest = sorted(range(self.count), key=lambda place: -self._room[place])[:wanted]
        places = tuple(sorted(roomiest))
        for place in places:
            self._room[place] -= 1
        names = ",".join(self._gpus[place] for place in places) if self._gpus else None
        shared = {MEMORY_SHARE: str(1 / self.jobs_per_device)} if names is not None and self.jobs_per_device > 1 else {}
        return SlotLease(
            places=places, environ={**self.threads, **({} if names is None else {VISIBLE: names}), **shared}
        )

    def give_back(self, grant: SlotLease) -> None:
        """Take the slots of an ended job back."""
        for place in grant.places:
            self._room[place] += 1

    def problems(self, label: str, wanted: int) -> list[Problem]:
        """Return the problem of a job that needs more slots than exist."""
        if wanted <= self.count:
            return []
        what = "GPUs" if self.on_gpus else "slots"
        rule = f"{label or 'a job'} takes {wanted} {what}. Give it fewer, or {self._key}={wanted} or more."
        return [Problem(key=self._key, value=self.count, rule=rule)]


def numbering_problems(problems_on: Callable[[int], Sequence[Problem]], *, there: int, own: int) -> list[Problem]:
    """Return problems of a strategy that arise only on the job's own GPUs: devices that it names by number."""
    known = {problem.key for problem in problems_on(there)}
    return [
        replace(problem, rule=f"{problem.rule} A job of a sweep sees only its own GPUs, numbered from 0.")
        for problem in problems_on(own)
        if problem.key not in known
    ]


def _problems(settings: Settings, num_gpus: int) -> list[Problem]:
    problems = []
    if num_gpus and settings.slots != "auto" and settings.slots > num_gpus:
        found = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        rule = f"this machine has {found}. Use {num_gpus} or less; jobs share a GPU with sweep.jobs_per_device."
        problems.append(Problem(key="sweep.slots", value=settings.slots, rule=rule))
    if not num_gpus and settings.jobs_per_device != 1:
        rule = "has no effect: there is no GPU here to share. Give sweep.slots, the number of parallel jobs."
        problems.append(Problem(key="sweep.jobs_per_device", value=settings.jobs_per_device, rule=rule))
    return problems


def _names(environ: Mapping[str, str], num_gpus: int) -> list[str]:
    """Return the names of the visible GPUs, as they are given to a job."""
    named = mig_instances(environ) or map(str.strip, environ.get(VISIBLE, "").split(","))
    visible = [name for name in named if name]
    return visible[:num_gpus] if visible else [str(number) for number in range(num_gpus)]
