"""Agreement: ranks are told to stop at different moments, and must end after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from trainkit.objectives.base import Collective

__all__ = ["Agreement"]

_INTERVAL_S: Final = 0.5
_REASONS: Final = ("stopped", "preempted")


class Agreement:
    """Asks all ranks, now and then, whether any of them was asked to stop.

    A question a step would cost an exchange a step. Rank 0 chooses how many steps pass until the next question, about
    half a second's worth, and tells it with each answer, so that every rank asks after the same step.

    Args:
        collective: the data ranks.
        requested: why this process was asked to stop, or None.
    """

    def __init__(self, collective: Collective, requested: Callable[[], str | None]) -> None:
        self._collective, self._requested = collective, requested
        self._interval = 1
        self._asked = time.perf_counter()

    def ask(self) -> str | None:
        """The reason to stop that any rank has; None: go on. Collective."""
        if self._collective.num_ranks == 1:
            return self._requested()
        reason = self._requested()
        flags = [float(reason == known) for known in _REASONS]
        proposal = float(self._propose()) if self._collective.rank == 0 else 0.0
        *asked, interval = self._collective.sum(torch.tensor([*flags, proposal], dtype=torch.float64)).tolist()
        self._interval = int(interval)
        self._asked = time.perf_counter()
        return next((known for known, count in zip(_REASONS, asked, strict=True) if count), None)

    @property
    def interval(self) -> int:
        """Steps until the next question; the same on every rank."""
        return self._interval

    def _propose(self) -> int:
        per_step = (time.perf_counter() - self._asked) / self._interval
        return max(1, min(int(_INTERVAL_S / max(per_step, 1e-9)), 2 * self._interval))
