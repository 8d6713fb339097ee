"""The interface of a system that runs the jobs of a sweep."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from trainkit.cluster.host import num_cores
from trainkit.config.schema import hints_of
from trainkit.config.values import closest, misfit, plain
from trainkit.errors import ConfigError, MissingExtraError, Problem
from trainkit.fields import at_least, limits_in, placement

_WHERE = "hydra.launcher"


class Handle(Protocol):
    """A submitted job."""

    def lost(self) -> str | None:
        """Return why the job will never report an exit code, or None while it still may. Polled."""

    def cancel(self) -> None:
        """Remove the job from the queue, or end it."""


class Submitter(Protocol):
    """A connected backend."""

    def submit(self, path: str, *, slots: int) -> Handle:
        """Submit a job: `run_described(path)`, with resources for `slots` processes.

        Args:
            path: path of the file that describes the job.
            slots: number of processes of the job.
        """


@dataclass(frozen=True, kw_only=True)
class JobBackend:
    """Base class of the backends; its fields are the keys of `hydra.launcher`."""

    name: ClassVar[str]
    """Name in messages."""
    packages: ClassVar[tuple[str, ...]]
    """The packages that it needs."""
    extra: ClassVar[str]
    """The extra of trainkit that installs them."""

    jobs_at_once: Annotated[int | Literal["auto"], placement, at_least(1)] = "auto"
    """Limit of processes of jobs submitted at a time; auto: one per core here, or as many as a cluster queues."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the backend with the keys of `hydra.launcher`.

        Raises:
            ConfigError: every unknown key and every value that does not fit.
        """
        problems = [problem for name, value in settings.items() for problem in _problems(cls, name, value)]
        if problems:
            raise ConfigError(problems)
        return cls(**settings)

    def require(self) -> None:
        """Check that the backend is installed.

        Raises:
            MissingExtraError: it is not installed.
        """
        for package in self.packages:
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder of that name in the current one is not a package
                raise MissingExtraError(key="hydra/launcher", package=package, extra=self.extra)

    def width(self) -> int:
        """Return the number of single-process jobs that are submitted at a time."""
        return num_cores() if self.jobs_at_once == "auto" else self.jobs_at_once

    def slots_of(self, processes: int) -> int:
        """Return the number of the `width` places that a job with `processes` processes takes."""
        return processes

    @abstractmethod
    def connect(self, folder: Path) -> AbstractContextManager[Submitter]:
        """Start the backend or connect to it; it may store files in `folder`. Leaving the block disconnects."""


def _problems(kind: type, name: str, value: Any) -> list[Problem]:
    hints = {key: hint for key, hint in hints_of(kind).items() if "ClassVar" not in str(hint)}
    key = f"{_WHERE}.{name}"
    if name not in hints:
        near = closest(name, hints)
        rule = f"no such key. Did you mean {_WHERE}.{near}?" if near else f"no such key. There are: {', '.join(hints)}."
        return [Problem(key=key, rule=rule, origin="command line")]
    wrong = misfit(value, plain(hints[name]))
    rules = [wrong] if wrong else [limit.rule for limit in limits_in(hints[name]) if limit.broken_by(value)]
    return [Problem(key=key, value=value, rule=one, origin="command line") for one in rules]
