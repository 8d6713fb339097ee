"""What `trainkit watch --json` prints, and what its page is sent."""

from __future__ import annotations

from typing import Literal, TypedDict


class WatchedRun(TypedDict):
    """One run."""

    folder: str
    """The run folder, relative to the folder that is watched."""
    name: str
    """The name of the run."""
    state: str
    """`starting`, `running`, `killed`, `silent`, `unknown`, or the status with which it ended."""
    note: str
    """A remark on the state; empty without one."""
    step: int | None
    """Updates done; null if unknown."""
    last_step: int | None
    """Updates after which it ends; null if unknown."""
    remaining_s: float | None
    """Seconds until then at the pace of its last row; null if it does not run, or unknown."""
    samples_per_s: float | None
    """Samples a second in its last row."""
    metrics: dict[str, float]
    """The newest training loss and the newest value of each metric of an evaluation."""
    updated: float | None
    """Seconds since 1970 of its last sign; null if unknown."""


class Watched(TypedDict):
    """What `trainkit watch --json` prints."""

    version: Literal[1]
    """Version of this document."""
    root: str
    """The folder that is watched."""
    runs: list[WatchedRun]
    """The runs below it, running ones first, then the most recently updated."""
    not_shown: int
    """Runs beyond the number that is shown."""
