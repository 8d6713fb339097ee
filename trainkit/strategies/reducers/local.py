"""One rank, any order: nothing to add."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainkit.strategies.reducers.base import Partials
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["LocalReducer"]


class LocalReducer:
    """Takes the sums that autograd accumulated as they are."""

    lanes = None

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """The sums of this rank."""
        ((_, sums),) = partials
        return sums
