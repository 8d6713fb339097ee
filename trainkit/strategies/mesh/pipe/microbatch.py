"""A microbatch of a step, and the time that a rank computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A microbatch: a shard of the step, or a repetition of one that only fills the schedule."""

    shard: int
    inputs: Any
    """The inputs of the model."""
    targets: Any
    share: float
    """Fraction of the samples of the step."""
    counts: bool = True
    """False for a repetition, which has no effect on the result."""
    rows: int | None = None
    """Samples that count: later rows only fill a shape; None: all."""

    def with_rows(self, count: int) -> Chunk:
        """Return the microbatch with so many rows; the last one is repeated, and counts once."""
        rows = self.tensors[0].shape[0]
        if rows == count:
            return self

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.cat([leaf, leaf[-1:].expand(count - rows, *leaf.shape[1:])]) if rows < count else leaf[:count]

        return replace(self, inputs=tree_map(filled, self.inputs), rows=min(rows, count))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the inputs of the model."""
        return tuple(leaf for leaf in tree_flatten(self.inputs)[0] if isinstance(leaf, Tensor))


class BusyTimer:
    """Measures the computing time of this rank in seconds; meaningless on devices that compute asynchronously."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def reset(self) -> None:
        """Reset to 0 seconds."""
        self.busy_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of the block."""
        start = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - start
