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

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:  # noqa: B027 - most keep no gradients
        """Announce a backward pass of this rank inside `reduce`.

        A reducer may take the gradients as they are computed, and exchange those of the last pass, which are final. For
        a gradient that it has taken, `param.grad` becomes a view of its own memory, or None; `partials` then has None.

        Args:
            params: parameters whose gradients it sums, in the order of the packing; the same in every pass.
            is_last: whether this is the last pass of this rank in the step.
        """

    def end_backward(self) -> None:  # noqa: B027
        """Announce that the pass has ended."""

    def close(self) -> None:  # noqa: B027 - most hold none
        """Release resources other than tensors; not collective."""


class LocalReducer(Reducer):
    """Returns the sums that autograd accumulated."""

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums of this rank."""
        ((_, sums),) = partials
        return sums
