"""The base class of reducers, and those of a single rank and of a replica over several devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from trainkit.strategies.reducers.compression import Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer, unsplit

Sums = Sequence[Tensor | None]
"""A sum for each tensor of a packing; None: zeros."""


class Reducer(ABC):
    """Sums the tensors of a step over its shards and ranks.

    The step calls `begin`, `begin_backward` and `end_backward` around each of its backward passes, `add` for what a
    lane (or all shards of this rank) gave, and `finish`.
    """

    lanes: int | None = None
    """Number of lanes of the order of summation; None: this rank's shards form one sum."""
    compressor: Compressor | None = None
    """Exchanges gradients in fewer bytes, with a loss of precision; None: they are exchanged as they are."""

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:  # noqa: ARG002 - for the order of lanes
        """Begin the sum of a step; an interrupted one is forgotten.

        Args:
            packing: shapes and dtype of each tensor.
            num_shards: number of shards of the step, over all ranks.
        """
        self._sums: Sums = [None] * len(packing.shapes)

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:  # noqa: B027 - most keep no gradients
        """Announce a backward pass of this rank.

        A reducer may take the gradients as they are computed, and exchange those of the last pass, which are final. For
        a gradient that it has taken, `param.grad` becomes a view of its own memory, or None.

        Args:
            params: parameters whose gradients it sums, in the order of the packing; the same in every pass.
            is_last: whether this is the last pass of this rank in the step.
        """

    def end_backward(self) -> None:  # noqa: B027
        """Announce that the pass has ended."""

    def has_taken(self, index: int) -> bool:  # noqa: ARG002 - most take none
        """Return whether the reducer has taken a gradient of this step."""
        return False

    def add(self, lane: int, sums: Sums) -> None:  # noqa: ARG002 - without lanes there is one sum, or none
        """Take the sums of this rank over the shards of a lane, in the order of `lane_order`; without lanes, over all.

        Tensors that `begin_backward` let the reducer take count by what it took.
        """
        self._sums = sums

    @abstractmethod
    def finish(self) -> Sums:
        """Return the sums over all shards of the step, the same on every rank, valid until `begin`; collective."""

    def close(self) -> None:  # noqa: B027 - most hold none
        """Release resources other than tensors; not collective."""


class LocalReducer(Reducer):
    """Returns the sums that autograd accumulated."""

    def finish(self) -> Sums:
        """Return the sums of this rank."""
        sums, self._sums = self._sums, ()
        return sums


class PerDeviceReducer(Reducer):
    """Sums the tensors of each device of a replica with a separate reducer, one device after the other.

    No gradient leaves its device, and no device holds a vector of all gradients. The exchanges begin when backward has
    ended: the devices of two ranks may finish their buckets in different orders, and every rank must exchange in the
    same order.

    Args:
        make: function that makes a reducer; called once for each place that holds tensors, in the same order on every
            rank.
    """

    def __init__(self, make: Callable[[], Reducer]) -> None:
        self._make = make
        self._reducers: list[Reducer] = []

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of each device."""
        super().begin(packing, num_shards=num_shards)
        self._parts = packing.parts
        while len(self._reducers) < len(self._parts):
            self._reducers.append(self._make())
        for reducer, part in zip(self._reducers, self._parts, strict=True):
            reducer.begin(part.packing, num_shards=num_shards)

    def finish(self) -> Sums:
        """Return the sums over all ranks, each tensor on its device. A rank without shards adds zeros."""
        own, self._sums = self._sums, ()
        found = []
        for reducer, part in zip(self._reducers, self._parts, strict=True):
            reducer.add(0, part.chosen(own))
            found.append(reducer.finish())
        return unsplit(self._parts, found)

    def close(self) -> None:
        """Close the reducers of all devices."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()
