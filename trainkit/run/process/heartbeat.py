"""The heartbeat of a rank: its step and phase, written for the supervisor into a few bytes of a mapped file."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.errors import UnreadableError
from trainkit.reading import open_descriptor, read_bytes
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.pauses import Pauses
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import PHASES, Phase

__all__ = ["Beats", "Heartbeat", "HeartbeatReading", "beats_of", "read_heartbeat"]

_BEAT: Final = struct.Struct("<dqd?")
"""Time on the machine's monotonic clock, step and phase in one number, the longest pause, whether it is the
first step.
"""
_NUMBERS: Final = {phase: number for number, phase in enumerate(PHASES)}


class Heartbeat:
    """Writes the heartbeat of one rank: a store into memory, without a system call.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank_0"
        >>> heartbeat = Heartbeat(path)
        >>> heartbeat.beat(3, "forward")
        >>> read_heartbeat(path).step
        3
        >>> heartbeat.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            if (size := os.fstat(descriptor).st_size) < _BEAT.size:
                # Written, not only truncated to this size: a store into a page without a free disk block would end the
                # process with SIGBUS.
                os.lseek(descriptor, size, os.SEEK_SET)
                os.write(descriptor, bytes(_BEAT.size - size))
            os.ftruncate(descriptor, _BEAT.size)  # never empty: the supervisor reads it between two starts
            self._memory = mmap.mmap(descriptor, _BEAT.size)
        finally:
            os.close(descriptor)
        self._pauses = Pauses()
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """Write that this rank is alive, and which phase begins.

        Args:
            step: updates completed.
            phase: the phase that begins.
        """
        moment, pauses = time.monotonic(), self._pauses
        pauses.note(phase, step, moment=moment)
        number = step * len(PHASES) + _NUMBERS[phase]
        _BEAT.pack_into(self._memory, 0, moment, number, pauses.longest_s, pauses.is_first)

    def close(self) -> None:
        """Unmap the file; its last heartbeat stays."""
        self._memory.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReading:
    """The last heartbeat of a rank."""

    moment: float
    """On `time.monotonic`, which all processes of a machine share."""
    step: int
    phase: Phase
    longest_s: float = 0.0
    """The longest recent pause between two heartbeats of a step, in seconds; 0.0 if there was none."""
    is_first: bool = False
    """Whether the current step is the first since the start, or the first that follows an evaluation."""

    @property
    def progress(self) -> tuple[int, int]:
        """A measure of progress; of ranks that wait for each other, the others wait for the one with the least."""
        return self.step, _NUMBERS[self.phase]


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """Return the last heartbeat; None if the rank has written none."""
    try:
        content = read_bytes(path, limit=_BEAT.size)
    except UnreadableError:
        return None
    if len(content) != _BEAT.size:
        return None
    moment, number, longest_s, is_first = _BEAT.unpack(content)
    step, phase = divmod(number, len(PHASES))
    if not moment or step < 0 or not 0 <= longest_s < math.inf:
        return None
    return HeartbeatReading(moment=moment, step=step, phase=PHASES[phase], longest_s=longest_s, is_first=is_first)


class Beats:
    """Reports the phases of a task to the supervisor and to failpoints.

    Args:
        heartbeat: writes the heartbeats.
    """

    within_steps: Final = True
    """Whether the phases within a step are reported as well."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self.phase: Phase = "start"
        """The last reported phase."""
        self.step = 0
        """Updates completed at that time."""

    def __call__(self, phase: Any, step: int) -> None:
        """Report that a phase begins.

        Args:
            phase: the phase.
            step: updates completed.
        """
        self.phase, self.step = phase, step
        self._heartbeat.beat(step, phase)
        failpoints.hit(phase, step)


def beats_of(identity: Identity, folder: RunFolder) -> Beats | None:
    """Return the reporter of a task's phases; None if the task is the only one and no failpoint is armed."""
    if identity.store is None and not failpoints.armed():
        return None
    folder.open_live()
    return Beats(Heartbeat(folder.heartbeat_of(identity.task.rank)))
