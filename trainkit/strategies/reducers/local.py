"""One rank, any order: nothing to add."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainkit.strategies.packing import Packing
from trainkit.strategies.reducers.base import Partials

__all__ = ["LocalReducer"]


class LocalReducer:
    """Takes the sums that autograd accumulated as they are."""

    lanes = None

    def reduce(self, partials: Partials, *, num_shards: int, packing: Packing) -> Sequence[Tensor | None]:  # noqa: ARG002
        """The sums of this rank."""
        ((_, sums),) = partials
        return sums
