"""Pass the gradients of a step to several listeners."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.strategies.base import GradientListener, UpdateTensors


class GradientListeners:
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[GradientListener]) -> None:
        self._listeners = listeners

    def wants(self, step: int) -> bool:
        """Return whether one of them looks at the step."""
        return any(one.wants(step) for one in self._listeners)

    def take(self, step: int, tensors: UpdateTensors) -> None:
        """Pass the tensors to those that look at the step."""
        for one in self._listeners:
            if one.wants(step):
                one.take(step, tensors)
