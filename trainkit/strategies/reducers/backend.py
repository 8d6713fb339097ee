"""The backend's own all-reduce (NCCL, gloo) of one flat vector: the fastest order, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.packing import Packing
from trainkit.strategies.reducers.base import Partials

__all__ = ["BackendReducer"]


class BackendReducer:
    """Sums over the default process group, always with SUM: an average taken back costs bits."""

    lanes = None

    def reduce(self, partials: Partials, *, num_shards: int, packing: Packing) -> Sequence[Tensor | None]:  # noqa: ARG002
        """The sums over all ranks. A rank without shards adds zeros."""
        flat = packing.empty()
        for _, sums in partials:
            packing.pack(sums, into=flat)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        return packing.views(flat)
