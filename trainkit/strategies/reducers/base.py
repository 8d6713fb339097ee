"""The interface of a reducer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["Closing", "Overlapping", "Partials", "Reducer"]

Partials = Iterator[tuple[int, Sequence[Tensor | None]]]
"""(lane, the sums over that lane's shards), computed as they are asked for."""


class Reducer(Protocol):
    """Adds the partial sums of a step, here and over the ranks."""

    @property
    def lanes(self) -> int | None:
        """Lanes of the order of summation; None: this rank's shards are one sum."""
        ...

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """The sums over all shards of the step, the same on every rank; collective.

        Args:
            partials: what this rank computes, lane after lane in the order of `lane_order`; without lanes at most
                one item.
            num_shards: shards of the step, over all ranks.
            packing: shapes and dtype of what each item holds.

        Returns:
            A tensor a shape of the packing; valid until the next call.
        """
        ...


@runtime_checkable
class Overlapping(Protocol):
    """A reducer that may begin while the last backward pass still runs."""

    def arm(self, params: Sequence[Tensor]) -> None:
        """The backward pass that comes now is this rank's last of the step: every gradient it leaves is final.

        Args:
            params: the parameters whose gradients are exchanged, in the order of the packing.
        """
        ...


@runtime_checkable
class Closing(Protocol):
    """A reducer that holds more than tensors."""

    def close(self) -> None:
        """Let go of it; not collective."""
        ...
