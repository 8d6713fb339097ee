"""Buffers of staged gradients, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from trainkit.numerics.batch import lane_order
from trainkit.numerics.summation import LaneNode, combine_pairwise

Parts = list[Tensor | None]
"""One tensor per piece of the server, in order; None if it has none."""

_KEPT = 4


class BufferPool:
    """Reuses memory: newly allocated large buffers cost more than the copy into them.

    Example:
        >>> pool = BufferPool(torch.float32)
        >>> memory = pool.take(8)
        >>> pool.give(memory)
        >>> pool.take(8) is memory
        True
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: list[Tensor] = []
        self._lock = Lock()

    def take(self, numel: int) -> Tensor:
        """Return an uninitialised vector."""
        with self._lock:
            for place, memory in enumerate(self._kept):
                if memory.numel() == numel:
                    return self._kept.pop(place)
        return torch.empty(numel, dtype=self.dtype)

    def give(self, memory: Tensor) -> None:
        """Return a vector that is no longer used to the pool."""
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(memory)


@dataclass(frozen=True, slots=True)
class StagedGradient:
    """A gradient that a worker has pushed."""

    parts: Parts
    """Gradients and sums of buffers, in the dtype of the master parameters."""
    memory: Tensor
    """The memory of the dense gradients."""


def lane_sum(shards: Sequence[Sequence[Tensor | None]], lanes: int | None) -> Parts:
    """Return the sum over the shards of a step, in the same order as `mirrored`; without lanes, one shard after
    another.

    Example:
        >>> [total] = lane_sum([[torch.tensor(1.0)], [None], [torch.tensor(2.0)]], 8)
        >>> total
        tensor(3.)
    """
    if lanes is None:
        return _in_order(shards)
    dense = [[_dense(one) for one in shard] for shard in shards]
    leaves = ((LaneNode(lane, lanes), _in_order(dense[lane::lanes])) for lane in lane_order(lanes) if lane < len(dense))
    return combine_pairwise(leaves, _over_lanes, num_lanes=lanes)


def _in_order(shards: Sequence[Sequence[Tensor | None]]) -> Parts:
    total = list(shards[0])
    for more in shards[1:]:
        _add_dense(total, more)
        total = [_joined(left, right) for left, right in zip(total, more, strict=True)]
    return total


def _over_lanes(left: Parts, right: Parts) -> Parts:
    """Return the sum of two lanes; a missing tensor counts as zeros, which may change the sign of a zero."""
    _add_dense(left, right)
    return [
        _joined(one, other) if one is not None and other is not None else _plus_zero(other if one is None else one)
        for one, other in zip(left, right, strict=True)
    ]


def _add_dense(total: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add dense tensors in place, if both exist."""
    pairs = [
        (left, right)
        for left, right in zip(total, more, strict=True)
        if left is not None and right is not None and not left.is_sparse and not right.is_sparse
    ]
    if pairs:
        torch._foreach_add_([left for left, _ in pairs], [right for _, right in pairs])


def _joined(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors; dense pairs have been added already."""
    if left is None or right is None:
        return right if left is None else left
    if left.is_sparse:
        return (left + right).coalesce() if right.is_sparse else right.add_(left)
    return left.add_(right) if right.is_sparse else left


def _plus_zero(one: Tensor | None) -> Tensor | None:
    return None if one is None else one.add_(0.0)


def _dense(one: Tensor | None) -> Tensor | None:
    return one.to_dense() if one is not None and one.is_sparse else one
