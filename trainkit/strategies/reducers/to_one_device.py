"""Reduction to one device: the backend sums on rank 0, which sends the sum to all."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.reducers.vectors import InPlaceVector

__all__ = ["ReduceThenBroadcastTransport"]


class ReduceThenBroadcastTransport(InPlaceVector):
    """Two exchanges through rank 0's link; where links are unequal, its may be the best one.

    Source: tf.distribute.ReductionToOneDevice.
    """

    def sum(self, flat: Tensor) -> Tensor:
        """The sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=0, op=dist.ReduceOp.SUM)
        dist.broadcast(flat, src=0)
        return flat
