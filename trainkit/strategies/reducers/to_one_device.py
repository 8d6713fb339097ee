"""Reduce to rank 0, which broadcasts the sum to all."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.reducers.vectors import InPlaceVector

__all__ = ["ReduceThenBroadcastTransport"]


class ReduceThenBroadcastTransport(InPlaceVector):
    """Reduce to rank 0, then broadcast. Useful when rank 0 has the fastest link.

    Source: tf.distribute.ReductionToOneDevice.
    """

    def sum(self, flat: Tensor) -> Tensor:
        """Sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=0, op=dist.ReduceOp.SUM)
        dist.broadcast(flat, src=0)
        return flat
