"""The pauses of a rank within its steps, from which the limit of a step is derived."""

from __future__ import annotations

from typing import Final

from trainkit.trainer.failpoints import Phase

__all__ = ["Pauses"]

_OF_A_STEP: Final[frozenset[Phase]] = frozenset({"data", "forward", "backward", "reduce", "update"})
_BESIDE_A_STEP: Final[frozenset[Phase]] = frozenset({"compile"})
"""Phases within a step whose duration says nothing about the duration of steps."""
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
        """Record a heartbeat.

        Args:
            phase: the phase that begins.
            step: updates completed.
            moment: seconds on a monotonic clock.
        """
        if self._phase in _OF_A_STEP:
            self._keep(moment - self._moment)
        self._moment, self._phase = moment, phase
        if phase in _OF_A_STEP:
            if step != self._step or not self._in_step:
                self._end_step()
                self._begin_step(step, moment)
        elif phase not in _BESIDE_A_STEP:
            self._end_step()
            self._begins = self._begins or phase in _BEGINNINGS
            self._evaluated = self._evaluated or phase == "evaluate"

    def _keep(self, pause_s: float) -> None:
        if not self._after_evaluation:
            self._current = max(self._current, pause_s)
        elif self._longest_after_evaluation is None or pause_s > self._longest_after_evaluation:
            self._longest_after_evaluation = pause_s

    def _begin_step(self, step: int, moment: float) -> None:
        if self._begins:
            self.is_first = True
            self._window_begun, self._window_steps = moment, 0
        elif self._evaluated:
            self._after_evaluation = True
            self.is_first = self._longest_after_evaluation is None
        self._turn_window(moment)
        self._in_step, self._step = True, step
        self._begins = self._evaluated = False

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = self._after_evaluation = self.is_first = False

    def _turn_window(self, moment: float) -> None:
        self._window_steps += 1
        if self._window_steps > _WINDOW_STEPS and moment - self._window_begun >= _WINDOW_S:
            self._earlier, self._current = self._current, 0.0
            self._window_begun, self._window_steps = moment, 1
