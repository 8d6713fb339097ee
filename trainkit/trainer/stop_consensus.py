"""Agree on stopping and saving: ranks are asked at different moments, but must act after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from trainkit.objectives.base import Collective

_INTERVAL_S: Final = 0.5
_REASONS: Final = ("stopped", "preempted", "hangup", "resized")


@dataclass(frozen=True, kw_only=True, slots=True)
class StopSaveDecision:
    """What all ranks do after this step."""

    stop: str | None
    """A reason to stop that some rank has; None: continue."""
    save: bool
    """Whether rank 0 decides that a save is due."""


class StopSaveConsensus:
    """Exchanges at intervals whether any rank was asked to stop, and whether rank 0 decides to save.

    An exchange at every step would be expensive. Rank 0 chooses the number of steps until the next one, about half a
    second, and includes it in each exchange, so that every rank takes part after the same step.

    Args:
        collective: all processes of the run.
        requested: returns why this process was asked to stop, or None.
        save_due: returns whether a save is due; rank 0 decides.
    """

    def __init__(
        self, collective: Collective, requested: Callable[[], str | None], save_due: Callable[[], bool] = lambda: False
    ) -> None:
        self._collective, self._requested, self._save_due = collective, requested, save_due
        self._interval = 1
        self._exchanged_at = time.perf_counter()

    def ask(self) -> StopSaveDecision:
        """Return what to do after this step, the same on every rank. Collective."""
        reason = self._requested()
        flags = [float(reason == known) for known in _REASONS]
        proposals = [float(self._save_due()), float(self._propose())] if self._collective.rank == 0 else [0.0, 0.0]
        summed = self._collective.sum(torch.tensor([*flags, *proposals], dtype=torch.float64)).tolist()
        *asked, save, interval = summed
        self._interval = int(interval)
        self._exchanged_at = time.perf_counter()
        stop = next((known for known, count in zip(_REASONS, asked, strict=True) if count), None)
        return StopSaveDecision(stop=stop, save=bool(save))

    @property
    def interval(self) -> int:
        """Steps until the next exchange; the same on every rank."""
        return self._interval

    def _propose(self) -> int:
        per_step = (time.perf_counter() - self._exchanged_at) / self._interval
        return max(1, min(int(_INTERVAL_S / max(per_step, 1e-9)), 2 * self._interval))
