"""A dummy batch for a rank that has none: its results do not count, but the other ranks wait for its collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from trainkit.errors import TrainingError
from trainkit.objectives.base import Collective
from trainkit.strategies.groups.gather_objects import all_gather_object

__all__ = ["dummy_batch"]


def dummy_batch(batch: Any, device: torch.device, everyone: Collective) -> Any:
    """Broadcast rank 0's batch to every rank that has none; collective over all ranks.

    Args:
        batch: this rank's own, which it keeps; None if it has none. Rank 0 has one.
        device: the device for collectives.
        everyone: all ranks.

    Raises:
        TrainingError: the batch holds more than tensors, numbers and text in lists, tuples and dicts.
    """
    sends = everyone.rank == 0
    leaves, spec = tree_flatten(batch if sends else None)
    description = [treespec_dumps(spec), [_described(leaf) for leaf in leaves]] if sends else None
    spec_text, described = all_gather_object(description, everyone)[0]
    own = leaves if sends else [None] * len(described)
    found = [_exchanged(leaf, description, device) for leaf, description in zip(own, described, strict=True)]
    return tree_unflatten(found, treespec_loads(spec_text)) if batch is None else batch


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return {"value": leaf}
    raise TrainingError(
        f"a batch holds a {type(leaf).__name__}, which cannot be told to a rank without a batch of its own. Choose "
        "batch.micro_size so that every step has a shard for each rank, or use batch.drop_last=true."
    )


def _exchanged(leaf: Any, description: dict[str, Any], device: torch.device) -> Any:
    if "value" in description:
        return description["value"]
    if leaf is None:
        leaf = torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device=device)
    held = leaf.detach().contiguous()
    dist.broadcast(held.reshape(-1).view(torch.uint8), src=0)  # as bytes: backends lack some dtypes
    return held
