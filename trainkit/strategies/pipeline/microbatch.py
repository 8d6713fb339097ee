"""A microbatch of a step, and the time that a rank computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten


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
