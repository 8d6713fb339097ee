"""Ring all-reduce: every rank communicates with its two neighbours only, and sends 2 (n - 1) / n of the vector."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.reducers.vectors import InPlaceVector
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["RingTransport"]


class RingTransport(InPlaceVector):
    """Reduce-scatter, then all-gather, each in n - 1 rounds of one slice to the right and one from the left.

    Slice *s* is summed in the order of the ranks from *s* on, in one place, so that all ranks end with equal bits.

    Args:
        collective: the ranks of the default group.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """

    def __init__(self, collective: Collective) -> None:
        self._rank, self._num_ranks = collective.rank, collective.num_ranks

    def vector(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part."""
        flat = super().vector(packing)
        self._slices = flat.tensor_split(self._num_ranks)
        self._received = torch.empty_like(self._slices[0])  # the first slice is the longest
        return flat

    def sum(self, flat: Tensor) -> Tensor:
        """Sum over all ranks, in place; collective."""
        count, slices = self._num_ranks, self._slices
        for turn in range(count - 1):
            incoming = slices[(self._rank - turn - 1) % count]
            received = self._received[: incoming.numel()]
            self._shift(slices[(self._rank - turn) % count], received)
            incoming.add_(received)
        for turn in range(count - 1):
            self._shift(slices[(self._rank - turn + 1) % count], slices[(self._rank - turn) % count])
        return flat

    def _shift(self, sent: Tensor, received: Tensor) -> None:
        """Send one slice to the right and receive one from the left; an empty one is not sent."""
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, (self._rank + 1) % self._num_ranks))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, (self._rank - 1) % self._num_ranks))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
