"""Reducers that exchange one flat vector: pack, sum by a transport, unpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.reducers.base import Partials
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["FlatReducer", "Transport"]


class Transport(Protocol):
    """Sums one vector over the ranks."""

    def vector(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part, (numel,); it still contains the values of the previous step."""
        ...

    def sum(self, flat: Tensor) -> Tensor:
        """Return the sum of every rank's vector, with equal bits on all ranks; valid until the next `vector`;
        collective.
        """
        ...

    def close(self) -> None:
        """Release the resources; not collective."""
        ...


class FlatReducer:
    """Packs the exchange of a step into a transport's vector, and unpacks the sum.

    Args:
        transport: sums the vector.
    """

    lanes = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums over all ranks. A rank without shards adds zeros."""
        flat = self._transport.vector(packing)
        sums: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, sums in partials:  # noqa: B007 - without lanes there is at most one
            pass
        packing.fill(self._views_of(flat, packing), sums)
        note_exchange(flat)
        return self._views_of(self._transport.sum(flat), packing)

    def _views_of(self, flat: Tensor, packing: FlatBuffer) -> list[Tensor]:
        """Return the tensors inside a vector; transports reuse their vectors, so the views are cached."""
        known = self._views.get(flat.data_ptr())
        if known is None or known[0] is not flat:
            known = self._views[flat.data_ptr()] = (flat, packing.views(flat))
        return known[1]

    def close(self) -> None:
        """Release memory and groups; not collective."""
        self._views.clear()
        self._transport.close()
