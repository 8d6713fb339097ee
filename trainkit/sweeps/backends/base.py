"""What an engine is that runs the jobs of a sweep."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from trainkit.config.schema import hints_of
from trainkit.config.values import at_least, closest, limits_in, misfit, plain
from trainkit.errors import ConfigError, MissingExtraError, Problem
from trainkit.fields import placement
from trainkit.run.folder.metadata import num_cores

__all__ = ["Handle", "JobBackend", "Submitter"]

_WHERE = "hydra.launcher"


class Handle(Protocol):
    """A job that an engine has been handed."""

    def lost(self) -> str | None:
        """Why it will not say how it ended; None while it may, and after it has. Asked now and then."""

    def cancel(self) -> None:
        """Take it back, or end it."""


class Submitter(Protocol):
    """An engine that answers."""

    def submit(self, path: str, *, slots: int, secrets: Mapping[str, str]) -> Handle:
        """Hand over a job: `run_described(path, secrets)`, with room for so many processes.

        Args:
            path: of the file that describes it.
            slots: its processes.
            secrets: variables that no file may hold; none where the engine does not carry them.
        """


@dataclass(frozen=True, kw_only=True)
class JobBackend:
    """The base of the engines; its fields are the keys of `hydra.launcher`."""

    name: ClassVar[str]
    """What it is called in messages."""
    packages: ClassVar[tuple[str, ...]]
    """The packages it is made of."""
    extra: ClassVar[str]
    """The extra of trainkit's that installs them."""

    carries_secrets: ClassVar[bool] = False
    """Whether it can hand variables to a job without writing them to a disk."""

    jobs_at_once: Annotated[int | Literal["auto"], placement, at_least(1)] = "auto"
    """Processes whose jobs are handed over at a time; auto: a core each here, or as many as a cluster queues."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The engine with the keys of `hydra.launcher`.

        Raises:
            ConfigError: every key that it does not know, and every value that does not fit.
        """
        problems = [problem for name, value in settings.items() for problem in _problems(cls, name, value)]
        if problems:
            raise ConfigError(problems)
        return cls(**settings)

    def require(self) -> None:
        """Make sure that the engine is installed.

        Raises:
            MissingExtraError: it is not.
        """
        for package in self.packages:
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder of that name in the current one is no package
                raise MissingExtraError(key="hydra/launcher", package=package, extra=self.extra)

    def width(self) -> int:
        """How many jobs of one process are handed over at a time."""
        return num_cores() if self.jobs_at_once == "auto" else self.jobs_at_once

    def slots_of(self, processes: int) -> int:
        """What a job of so many processes counts for among `width`."""
        return processes

    @abstractmethod
    def connect(self, folder: Path) -> AbstractContextManager[Submitter]:
        """Start the engine, or find it; `folder` is for what it keeps. Leaving the block lets go of it."""


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
