"""The base class of reducers, and the reducer of a single rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from trainkit.strategies.tensors.layouts import FlatBuffer

Partials = Iterator[tuple[int, Sequence[Tensor | None]]]
"""(lane, the sums over that lane's shards), computed on iteration."""


class Reducer(ABC):
    """Sums the partial sums of a step, locally and over the ranks."""

    lanes: int | None = None
    """Number of lanes of the order of summation; None: this rank's shards form one sum."""

    @abstractmethod
    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """Return the sums over all shards of the step, the same on every rank; collective.

        Args:
            partials: the sums of this rank, lane after lane in the order of `lane_order`; without lanes at most one
                item.
            num_shards: number of shards of the step, over all ranks.
            packing: shapes and dtype of each item.

        Returns:
            One tensor per shape of the packing; valid until the next call.
        """

    def arm(self, params: Sequence[Tensor]) -> None:  # noqa: B027 - most do not overlap with backward
        """Announce this rank's last backward pass of the step: every gradient that it computes is final."""

    def close(self) -> None:  # noqa: B027 - most hold none
        """Release resources other than tensors; not collective."""


class LocalReducer(Reducer):
    """Returns the sums that autograd accumulated."""

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums of this rank."""
        ((_, sums),) = partials
        return sums
