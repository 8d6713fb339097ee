"""The vector of a transport that sums in place."""

from __future__ import annotations

from torch import Tensor

from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["InPlaceVector"]


class InPlaceVector:
    """Reuses one vector in all steps: a new allocation would cost page faults every time."""

    _flat: Tensor | None = None

    def vector(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part."""
        if self._flat is None:
            self._flat = packing.empty()
        return self._flat

    def close(self) -> None:
        """Release the vector."""
        self._flat = None
