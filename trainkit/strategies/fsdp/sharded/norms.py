"""Compute norms of full gradients from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.core.replica import JoinNorms
from trainkit.strategies.fsdp.sharded.shard_geometry import ShardSlice

__all__ = ["joined_norms"]


def joined_norms(cuts: Sequence[ShardSlice], device: torch.device) -> JoinNorms:
    """Return a function that combines norms of shards into norms of full tensors, over all ranks of the run.

    Args:
        cuts: the slices of the shards, parameter by parameter.
        device: the device for collectives.
    """
    counts = torch.tensor([float(cut.is_written) for cut in cuts])

    def join(norms: Tensor, places: Sequence[int], order: float) -> Tensor:
        """Return (number of present gradients,) their norms; collective."""
        found = torch.zeros(len(cuts), dtype=norms.dtype, device=device)
        chosen = torch.tensor(places)
        if order == float("inf"):  # values that are not finite must win, and a maximum may lose a NaN
            found[chosen] = torch.where(torch.isfinite(norms), norms, float("inf")).to(device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return found[chosen]
        found[chosen] = (norms**order * counts[chosen].to(norms)).to(device)
        dist.all_reduce(found)
        joined: Tensor = found[chosen] ** (1 / order)
        return joined

    return join
