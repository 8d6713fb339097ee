"""Output of `trainkit advise --json`."""

from __future__ import annotations

from typing import Literal, TypedDict


class AdvisedWay(TypedDict):
    """One way to train."""

    overrides: list[str]
    """Arguments to add to the command line."""
    command: str
    """The command that plans it."""
    reason: str
    """Why it is the best way, or why it is not."""
    fits: bool | None
    """Whether it fits into the memory; null if its plan is refused or its activations are unknown."""
    needs: int | None
    """Bytes that the device with the largest share needs."""
    devices: int | None
    """Number of devices that train."""
    step_s: float | None
    """Seconds of a step, the middle of the plan's band."""
    cost: float | None
    """US dollars to the end of the training; null without a price."""


class AdviceDocument(TypedDict):
    """Output of `trainkit advise --json`."""

    version: Literal[1]
    """Version of this document."""
    goal: Literal["time", "cost", "memory"]
    """The goal by which the ways are ranked."""
    hardware: str
    """The device that is planned for."""
    devices: int
    """Largest number of devices."""
    best: AdvisedWay | None
    """The best way; null if none can be chosen."""
    runner_up: AdvisedWay | None
    """The second best."""
    ways: list[AdvisedWay]
    """All ways: the ranking, then the ways that cannot be chosen."""
