"""The pulse of a rank: which step and phase it is in, told to the supervisor through a few bytes of a mapped file."""

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
from trainkit.run.hang_detection.pauses import Pauses
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import PHASES, Phase

__all__ = ["Beats", "Heartbeat", "HeartbeatReading", "beats_of", "read_heartbeat"]

_BEAT: Final = struct.Struct("<dqd?")
"""The moment on the machine's monotonic clock, step and phase in one number, the longest pause, the first step."""
_NUMBERS: Final = {phase: number for number, phase in enumerate(PHASES)}


class Heartbeat:
    """Writes the pulse of one rank; a beat is a store into memory, no call to the system.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank_0"
        >>> heart = Heartbeat(path)
        >>> heart.beat(3, "forward")
        >>> read_heartbeat(path).step
        3
        >>> heart.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            if (size := os.fstat(descriptor).st_size) < _BEAT.size:
                # Written, not only made this long: a store into a page for which the disk has no block left would end
                # the process with SIGBUS.
                os.lseek(descriptor, size, os.SEEK_SET)
                os.write(descriptor, bytes(_BEAT.size - size))
            os.ftruncate(descriptor, _BEAT.size)  # never empty: the supervisor reads it between two lives
            self._memory = mmap.mmap(descriptor, _BEAT.size)
        finally:
            os.close(descriptor)
        self._pauses = Pauses()
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """Say that this rank lives, and what it is about to do.

        Args:
            step: updates completed.
            phase: what begins now.
        """
        moment, pauses = time.monotonic(), self._pauses
        pauses.note(phase, step, moment=moment)
        number = step * len(PHASES) + _NUMBERS[phase]
        _BEAT.pack_into(self._memory, 0, moment, number, pauses.longest_s, pauses.is_first)

    def close(self) -> None:
        """Let go of the file; its last beat stays."""
        self._memory.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReading:
    """The last beat of a rank."""

    moment: float
    """On `time.monotonic`, which all processes of a machine share."""
    step: int
    phase: Phase
    longest_s: float = 0.0
    """The longest recent pause between two beats of a step, in seconds; 0.0 where there was none."""
    is_first: bool = False
    """Whether the step under way is the first since the start, or the first of all that follow an evaluation."""

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; of ranks that wait for each other, the least is the one they wait for."""
        return self.step, _NUMBERS[self.phase]


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """The last beat; None where the rank has not come to its first."""
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
    """Tells the supervisor, and planted failures, what a task does.

    Args:
        heartbeat: takes the beats.
    """

    within_steps: Final = True
    """Whether the parts of a step are to be told as well."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self.phase: Phase = "start"
        """What was told last."""
        self.step = 0
        """Updates completed then."""

    def __call__(self, phase: Any, step: int) -> None:
        """Say that a phase begins.

        Args:
            phase: what begins.
            step: updates completed.
        """
        self.phase, self.step = phase, step
        self._heartbeat.beat(step, phase)
        failpoints.hit(phase, step)


def beats_of(identity: Identity, folder: RunFolder) -> Beats | None:
    """Return what tells of a task's phases; None: nobody listens to one that is alone."""
    if identity.store is None and not failpoints.armed():
        return None
    folder.open_live()
    return Beats(Heartbeat(folder.heartbeat_of(identity.task.rank)))
