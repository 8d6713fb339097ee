"""Sum the tensors of a replica that spans several devices, those of each device in a separate vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.tensors.layouts import FlatBuffer, unsplit


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

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """Return the sums over all ranks, each tensor on its device. A rank without shards adds zeros."""
        own: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, own in partials:  # noqa: B007 - without lanes there is at most one
            pass
        parts = packing.parts
        while len(self._reducers) < len(parts):
            self._reducers.append(self._make())
        sums = [
            reducer.reduce(iter([(0, part.chosen(own))]), num_shards=num_shards, packing=part.packing)
            for reducer, part in zip(self._reducers, parts, strict=True)
        ]
        return unsplit(parts, sums)

    def close(self) -> None:
        """Close the reducers of all devices."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()
