"""A ring: every rank speaks to its two neighbours only, and sends 2 (n - 1) / n of the vector, whatever n is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.reducers.vectors import InPlaceVector
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["RingTransport"]


class RingTransport(InPlaceVector):
    """Reduce-scatter, then all-gather, each in n - 1 turns of one slice to the right and one from the left.

    Slice *s* is added up in the order of the ranks from *s* on, at one place, so all ranks end with the same bits.

    Args:
        collective: the ranks of the default group.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """

    def __init__(self, collective: Collective) -> None:
        self._rank, self._num_ranks = collective.rank, collective.num_ranks

    def vector(self, packing: FlatBuffer) -> Tensor:
        """What to write this rank's part into."""
        flat = super().vector(packing)
        self._slices = flat.tensor_split(self._num_ranks)
        self._received = torch.empty_like(self._slices[0])  # the first is the longest
        return flat

    def sum(self, flat: Tensor) -> Tensor:
        """The sum over all ranks, in place; collective."""
        count, slices = self._num_ranks, self._slices
        for turn in range(count - 1):
            coming = slices[(self._rank - turn - 1) % count]
            received = self._received[: coming.numel()]
            self._pass_on(slices[(self._rank - turn) % count], received)
            coming.add_(received)
        for turn in range(count - 1):
            self._pass_on(slices[(self._rank - turn + 1) % count], slices[(self._rank - turn) % count])
        return flat

    def _pass_on(self, sent: Tensor, received: Tensor) -> None:
        """One slice to the right while one comes from the left; an empty one is not sent."""
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, (self._rank + 1) % self._num_ranks))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, (self._rank - 1) % self._num_ranks))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
