"""Norms of whole gradients, from the parts that ranks hold of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.core.replica import JoinNorms
from trainkit.strategies.fsdp.sharded.shard_geometry import ShardSlice

__all__ = ["joined_norms"]


def joined_norms(cuts: Sequence[ShardSlice], device: torch.device) -> JoinNorms:
    """What makes norms of parts those of the whole tensors, over all ranks of the run.

    Args:
        cuts: where the parts lie, parameter by parameter.
        device: where ranks exchange tensors.
    """
    counts = torch.tensor([float(cut.is_written) for cut in cuts])

    def join(norms: Tensor, places: Sequence[int], order: float) -> Tensor:
        """(gradients that are there,) their norms; collective."""
        found = torch.zeros(len(cuts), dtype=norms.dtype, device=device)
        chosen = torch.tensor(places)
        if order == float("inf"):  # what is not finite must win, and a maximum may lose a NaN
            found[chosen] = torch.where(torch.isfinite(norms), norms, float("inf")).to(device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return found[chosen]
        found[chosen] = (norms**order * counts[chosen].to(norms)).to(device)
        dist.all_reduce(found)
        joined: Tensor = found[chosen] ** (1 / order)
        return joined

    return join
