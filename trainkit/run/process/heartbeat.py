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

from trainkit.cluster.tasks import Identity
from trainkit.errors import UnreadableError
from trainkit.files import open_descriptor, read_bytes
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import PHASES, Phase

_BEAT: Final = struct.Struct("<dqd?")
"""Time on the machine's monotonic clock, step and phase in one number, the longest pause, whether it is the
first step.
"""
_NUMBERS: Final = {phase: number for number, phase in enumerate(PHASES)}


class Heartbeat:
    """Reports the phases of one rank to its agent, by a store into memory without a system call, and to failpoints.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank_0"
        >>> heartbeat = Heartbeat(path)
        >>> heartbeat.beat(3, "forward")
        >>> read_heartbeat(path).step
        3
        >>> heartbeat.close()
    """

    within_steps: Final = True
    """Whether the phases within a step are reported as well."""
    phase: Phase = "start"
    """The last reported phase."""
    step = 0
    """Updates completed at that time."""

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
        """Write that this rank is alive, and the phase that begins."""
        moment, pauses = time.monotonic(), self._pauses
        self.phase, self.step = phase, step
        pauses.note(phase, step, moment=moment)
        number = step * len(PHASES) + _NUMBERS[phase]
        _BEAT.pack_into(self._memory, 0, moment, number, pauses.longest_s, pauses.is_first)

    def __call__(self, phase: Any, step: int) -> None:
        """Report that a phase begins."""
        self.beat(step, phase)
        if failpoints.ARMED:
            failpoints.hit(phase, step)

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
    is_counted: bool = False
    """Whether the steps were only counted: the phase within the step is not known, and `phase` is its first."""

    @property
    def position(self) -> str:
        """The step and the phase, for a message."""
        return f"step {self.step}" if self.is_counted else f"step {self.step} ({self.phase})"

    @property
    def progress(self) -> tuple[int, int]:
        """A measure of progress; ranks that wait for each other wait for the one with the least progress."""
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


def beats_of(identity: Identity, folder: RunFolder) -> Heartbeat | None:
    """Return the reporter of a task's phases; None if the task is the only one and no failpoint is armed."""
    if identity.store is None and not failpoints.ARMED:
        return None
    folder.open_live()
    return Heartbeat(folder.heartbeat_of(identity.task.rank))


_OF_A_STEP: Final[frozenset[Phase]] = frozenset({"data", "forward", "backward", "reduce", "update"})
_BESIDE_A_STEP: Final[frozenset[Phase]] = frozenset({"compile"})
"""Phases within a step whose duration is unrelated to the duration of steps."""
_BEGINNINGS: Final[frozenset[Phase]] = frozenset({"start", "join", "load"})
"""Phases after which a step opens the data and warms up again."""
_WINDOW_S: Final = 60.0
_WINDOW_STEPS: Final = 50


class Pauses:
    """Keeps the longest recent pause between two heartbeats of a step.

    A window holds at least 50 steps and at least 60 seconds; the longest pause is that of the current window and the
    one before. So a slow first step counts at first and is dropped after a while. The first step after an evaluation is
    compared with other steps that followed an evaluation.

    Example:
        >>> pauses = Pauses()
        >>> for step in range(3):
        ...     pauses.note("data", step, moment=10.0 * step)
        >>> pauses.longest_s, pauses.is_first
        (10.0, False)
    """

    def __init__(self) -> None:
        self.is_first = True
        """Whether the current step is the first since the start, or the first that follows an evaluation."""
        self._phase: Phase = "start"
        self._step = -1
        self._moment = 0.0
        self._in_step = False
        self._begins, self._evaluated = True, False  # events since the last step
        self._after_evaluation = False
        self._longest_after_evaluation: float | None = None
        self._current = self._earlier = 0.0
        self._window_begun, self._window_steps = 0.0, 0

    @property
    def longest_s(self) -> float:
        """The longest pause to compare the current step with, in seconds; 0.0 if there was none."""
        after = self._longest_after_evaluation if self._after_evaluation else None
        return max(self._current, self._earlier, after or 0.0)

    def note(self, phase: Phase, step: int, *, moment: float) -> None:
        """Record a heartbeat."""
        if self._phase in _OF_A_STEP:
            pause_s = moment - self._moment
            if self._after_evaluation:
                self._longest_after_evaluation = max(self._longest_after_evaluation or 0.0, pause_s)
            else:
                self._current = max(self._current, pause_s)
        self._moment, self._phase = moment, phase
        if phase in _OF_A_STEP:
            if step != self._step or not self._in_step:
                self._end_step()
                self._begin_step(step, moment)
        elif phase not in _BESIDE_A_STEP:
            self._end_step()
            self._begins = self._begins or phase in _BEGINNINGS
            self._evaluated = self._evaluated or phase == "evaluate"

    def _begin_step(self, step: int, moment: float) -> None:
        if self._begins:
            self.is_first = True
            self._window_begun, self._window_steps = moment, 0
        elif self._evaluated:
            self._after_evaluation = True
            self.is_first = self._longest_after_evaluation is None
        self._window_steps += 1
        if self._window_steps > _WINDOW_STEPS and moment - self._window_begun >= _WINDOW_S:
            self._earlier, self._current = self._current, 0.0
            self._window_begun, self._window_steps = moment, 1
        self._in_step, self._step = True, step
        self._begins = self._evaluated = False

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = self._after_evaluation = self.is_first = False
