"""Define the document that `trainkit watch --json` prints."""

from __future__ import annotations

from typing import Literal, TypedDict


class WatchedRun(TypedDict):
    """One watched run."""

    folder: str
    """The run folder, relative to the watched folder."""
    name: str
    """Name of the run."""
    state: str
    """`starting`, `running`, `killed`, `silent`, `unknown`, or the status with which the run ended."""
    note: str
    """Note on the state; may be empty."""
    step: int | None
    """Updates done; null if unknown."""
    last_step: int | None
    """Updates after which the run ends; null if unknown."""
    remaining_s: float | None
    """Seconds until its end at the speed of its last row; null if it is not running, or unknown."""
    samples_per_s: float | None
    """Samples per second in its last row."""
    metrics: dict[str, float]
    """The newest training loss and the newest value of each metric of an evaluation."""
    updated: float | None
    """Time of its last sign of life, in seconds since 1970; null if unknown."""


class Watched(TypedDict):
    """The output of `trainkit watch --json`."""

    version: Literal[1]
    """Version of this document."""
    root: str
    """The watched folder."""
    runs: list[WatchedRun]
    """The runs below it, running ones first, then by their last update."""
    not_shown: int
    """Number of runs that are not shown."""
