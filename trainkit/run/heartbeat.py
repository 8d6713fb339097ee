"""The pulse of a rank: which step and phase it is in, told to the supervisor through 16 bytes of a mapped file."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.engine import failpoints
from trainkit.engine.failpoints import PHASES, Phase
from trainkit.errors import UnreadableError
from trainkit.reading import open_descriptor, read_bytes
from trainkit.run.folder import RunFolder

__all__ = ["Heartbeat", "Pulse", "pulse_of", "read_pulse"]

_LAYOUT: Final = struct.Struct("<dq")  # moment on the machine's monotonic clock; step and phase in one number
_NUMBERS: Final = {phase: number for number, phase in enumerate(PHASES)}


class Heartbeat:
    """Writes the pulse of one rank; a beat is a store into memory, no call to the system.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank_0"
        >>> heart = Heartbeat(path)
        >>> heart.beat(3, "forward")
        >>> read_pulse(path).step
        3
        >>> heart.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, _LAYOUT.size)  # never empty: the supervisor reads it between two lives
            self._memory = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """Say that this rank lives, and what it is about to do.

        Args:
            step: updates completed.
            phase: what begins now.
        """
        _LAYOUT.pack_into(self._memory, 0, time.monotonic(), step * len(PHASES) + _NUMBERS[phase])

    def close(self) -> None:
        """Let go of the file; its last beat stays."""
        self._memory.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The last beat of a rank."""

    moment: float
    """On `time.monotonic`, which all processes of a machine share."""
    step: int
    phase: Phase

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; of ranks that wait for each other, the least is the one they wait for."""
        return self.step, _NUMBERS[self.phase]


def read_pulse(path: Path) -> Pulse | None:
    """The last beat; None where the rank has not come to its first."""
    try:
        content = read_bytes(path, limit=_LAYOUT.size)
    except UnreadableError:
        return None
    if len(content) != _LAYOUT.size:
        return None
    moment, number = _LAYOUT.unpack(content)
    step, phase = divmod(number, len(PHASES))
    return Pulse(moment=moment, step=step, phase=PHASES[phase]) if moment else None


def pulse_of(identity: Identity, folder: RunFolder) -> Callable[[Any, int], None] | None:
    """Tells the supervisor and planted failures (phase, step) of a task; None: nobody listens to one that is alone."""
    if identity.store is None and not failpoints.armed():
        return None
    heartbeat = Heartbeat(folder.heartbeat_of(identity.task.rank))

    def enter(phase: Any, step: int) -> None:
        heartbeat.beat(step, phase)
        failpoints.reached(phase, step)

    return enter
