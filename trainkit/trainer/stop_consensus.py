"""Agreement: ranks are told to stop at different moments, or find a save due, and must act after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from trainkit.objectives.base import Collective

__all__ = ["StopSaveConsensus", "StopSaveDecision"]

_INTERVAL_S: Final = 0.5
_REASONS: Final = ("stopped", "preempted", "hangup", "resized")


@dataclass(frozen=True, kw_only=True, slots=True)
class StopSaveDecision:
    """What all ranks do after this step."""

    stop: str | None
    """The reason to stop that any rank has; None: go on."""
    save: bool
    """Whether rank 0 finds that a save is due."""


class StopSaveConsensus:
    """Asks all ranks, now and then, whether any of them was asked to stop, and rank 0 whether it is time to save.

    A question a step would cost an exchange a step. Rank 0 chooses how many steps pass until the next question, about
    half a second's worth, and tells it with each answer, so that every rank asks after the same step.

    Args:
        collective: all processes of the run.
        requested: why this process was asked to stop, or None.
        save_due: whether it is time to save; rank 0's word counts.
    """

    def __init__(
        self, collective: Collective, requested: Callable[[], str | None], save_due: Callable[[], bool] = lambda: False
    ) -> None:
        self._collective, self._requested, self._save_due = collective, requested, save_due
        self._interval = 1
        self._asked = time.perf_counter()

    def ask(self) -> StopSaveDecision:
        """What to do after this step, the same on every rank. Collective."""
        reason = self._requested()
        flags = [float(reason == known) for known in _REASONS]
        proposals = [float(self._save_due()), float(self._propose())] if self._collective.rank == 0 else [0.0, 0.0]
        told = self._collective.sum(torch.tensor([*flags, *proposals], dtype=torch.float64)).tolist()
        *asked, save, interval = told
        self._interval = int(interval)
        self._asked = time.perf_counter()
        stop = next((known for known, count in zip(_REASONS, asked, strict=True) if count), None)
        return StopSaveDecision(stop=stop, save=bool(save))

    @property
    def interval(self) -> int:
        """Steps until the next question; the same on every rank."""
        return self._interval

    def _propose(self) -> int:
        per_step = (time.perf_counter() - self._asked) / self._interval
        return max(1, min(int(_INTERVAL_S / max(per_step, 1e-9)), 2 * self._interval))
