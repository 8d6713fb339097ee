"""The base class of reducers, and the reducer of a single rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["Closing", "LocalReducer", "Overlapping", "Partials", "Reducer"]

Partials = Iterator[tuple[int, Sequence[Tensor | None]]]
"""(lane, the sums over that lane's shards), computed on iteration."""


class Reducer(Protocol):
    """Sums the partial sums of a step, locally and over the ranks."""

    @property
    def lanes(self) -> int | None:
        """Number of lanes of the order of summation; None: this rank's shards form one sum."""
        ...

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
        ...


@runtime_checkable
class Overlapping(Protocol):
    """A reducer that may start while the last backward pass still runs."""

    def arm(self, params: Sequence[Tensor]) -> None:
        """Announce this rank's last backward pass of the step: every gradient that it computes is final.

        Args:
            params: the parameters whose gradients are exchanged, in the order of the packing.
        """
        ...


@runtime_checkable
class Closing(Protocol):
    """A reducer with resources other than tensors."""

    def close(self) -> None:
        """Release the resources; not collective."""
        ...


class LocalReducer:
    """Returns the sums that autograd accumulated."""

    lanes = None

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums of this rank."""
        ((_, sums),) = partials
        return sums
