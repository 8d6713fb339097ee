"""A callback that writes the bytes that have crossed the loopback device, for tests of the traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run

NAME = "loopback"
"""A file of the run folder: a line for each step, with the bytes sent until its end."""


def sent_bytes() -> int:
    """Return the bytes that this network has sent over its loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


@dataclass(frozen=True, kw_only=True)
class LoopbackBytes(Callback):
    """Writes the bytes sent until the end of each step of the rank that writes the files of the run."""

    observes: ClassVar[bool] = True

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Append a line."""
        if run.is_owner:
            with (run.folder / NAME).open("a") as file:
                file.write(f"{sent_bytes()}\n")
