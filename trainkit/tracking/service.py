"""Define the interface of a tracker's service, and the data that it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One run in a tracker."""

    folder: Path
    """The run folder."""
    id: str
    """32 hexadecimal digits, the same after a resume."""
    project: str
    """Project or experiment of the run."""
    mode: str
    """`online`, or `offline` if the tracker can write for a later upload."""
    name: str
    """Displayed name: that of the run and of its folder."""
    fingerprint: str
    """Hash of the keys that decide the result."""
    parameters: Mapping[str, str | float | bool]
    """Full key -> value, without secrets; lists as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRow:
    """Metrics of one step."""

    step: int
    """Number of updates done."""
    values: Mapping[str, float]
    """Finite numbers by name."""


class Service(Protocol):
    """A tracker. Every method may raise any error, and may take any time: the training does not wait for it."""

    holds_last: bool
    """Whether the rows of the last step are kept back until those of another step, or the end, follow."""

    def open(self, run: TrackedRun) -> None:
        """Create the tracked run, or continue the one with this id."""

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Send rows, in the order of their steps."""

    def add_file(self, path: Path, name: str) -> None:
        """Send a file of the run folder under its relative name."""

    def close(self, *, has_finished: bool, status: str) -> None:
        """Send the rest, and end the tracked run; `status` as in `result.json`, or `killed`."""


SERVICES: Final[Mapping[str, str]] = {
    name: f"trainkit.tracking.services.{name}" for name in ("mlflow", "trackio", "wandb")
}
"""Tracker -> the module whose `make` returns its service."""


def service_of(tracker: str) -> Service:
    """Return the service of a tracker; imports its package.

    Args:
        tracker: a key of `SERVICES`.
    """
    return cast("Service", import_module(SERVICES[tracker]).make())
