"""The reducer for a single rank: no communication."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainkit.strategies.reducers.base import Partials
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["LocalReducer"]


class LocalReducer:
    """Returns the sums that autograd accumulated."""

    lanes = None

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums of this rank."""
        ((_, sums),) = partials
        return sums
