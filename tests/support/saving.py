"""Checkpoints of whole tensors, as a run of one process writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.strategies.tensor_shards import ShardedState, TensorShard
from trainkit.trainer.checkpoint.retention import Retention
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.manifest import Checkpoint
from trainkit.trainer.ownership import OwnershipToken, uncontested


def whole(tensors: Mapping[str, Tensor]) -> ShardedState:
    """Each tensor as its only piece."""
    return {name: (TensorShard.whole(tensor),) for name, tensor in tensors.items()}


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    metric: float | None = None,
    retention: Retention | None = None,
    confirm: Callable[[], None] = uncontested,
    owner: OwnershipToken | None = None,
) -> Checkpoint:
    """Save without a thread."""
    saver = Saver(root, retention=retention, confirm=confirm, owner=owner, background=False)
    saver.save(step=step, pieces=whole(tensors), meta=meta, metric=metric)
    return saver.close()[0]
