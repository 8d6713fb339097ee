"""The vector of a transport that sums in place."""

from __future__ import annotations

from torch import Tensor

from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["InPlaceVector"]


class InPlaceVector:
    """Keeps one vector of this rank's own from step to step: a new one would cost its page faults every time."""

    _flat: Tensor | None = None

    def vector(self, packing: FlatBuffer) -> Tensor:
        """What to write this rank's part into."""
        if self._flat is None:
            self._flat = packing.empty()
        return self._flat

    def close(self) -> None:
        """Let go of the vector."""
        self._flat = None
