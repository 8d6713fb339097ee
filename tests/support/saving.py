"""Checkpoints of whole tensors, as a run of one process writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.strategies.tensor_shards import ShardedState, TensorShard
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.manifest import Checkpoint


def whole(tensors: Mapping[str, Tensor]) -> ShardedState:
    """Each tensor as its only piece."""
    return {name: (TensorShard.whole(tensor),) for name, tensor in tensors.items()}


def save(root: Path, *, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], **more: Any) -> Checkpoint:
    """Save without a thread; further arguments are the metric, and those of the saver."""
    metric = more.pop("metric", None)
    saver = Saver(root, background=False, **more)
    saver.save(step=step, pieces=whole(tensors), meta=meta, metric=metric)
    return saver.close()[0]
