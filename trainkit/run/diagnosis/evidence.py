"""Evidence of one step: the gradient of every shard, computed by a plain loop, and the values that the rules derive
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by the canonical name of their parameter or buffer."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The results of forward and backward of one shard, started from the parameters and buffers of its step."""

    gradient: Tensors
    """The gradient of the summed loss, for parameters that received one."""
    weight: float
    """The number of targets that the loss counts."""
    size: int
    """The number of samples."""
    replica: int = 0
    """The replica of the candidate that computes this shard."""
    buffers: Tensors = field(default_factory=dict)
    """The buffers after the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The results that points 3 and 4 of the numbers contract derive from the shards of a step."""

    gradient: Tensors
    """The sum over all shards, divided by the total weight."""
    scale: Mapping[str, float]
    """The sum of the norms of the terms of that sum, which bounds its rounding."""
    buffers: Tensors
    """The buffers after the step."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """All data that a hypothesis about one step may use."""

    step: int
    shards: Sequence[Shard]
    num_replicas: int = 1
    buffers: Tensors = field(default_factory=dict)
    """The buffers before the step."""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The strides of every parameter."""
    drawn_alike: Callable[[], Sequence[Shard]] | None = None
    """Compute the shards with the random numbers of shard 0; None if nothing draws."""
    in_sequence: Callable[[Sequence[int]], Tensors] | None = None
    """Compute the buffers after the forward passes of some shards, each started from the buffers of the last."""

    @property
    def weight(self) -> float:
        """The number of targets of the step."""
        return sum(shard.weight for shard in self.shards)

    @property
    def size(self) -> int:
        """The number of samples of the step."""
        return sum(shard.size for shard in self.shards)

    @property
    def gradient(self) -> Tensors:
        """The gradient as point 3 of the contract defines it."""
        return combine(self.shards, [1.0 / self.weight] * len(self.shards))

    def of_replica(self, replica: int) -> list[Shard]:
        """Return the shards that one replica computes."""
        return [shard for shard in self.shards if shard.replica == replica]


def combine(shards: Sequence[Shard], factors: Sequence[float]) -> dict[str, Tensor]:
    """Return the sum of the gradients of some shards, each multiplied by its factor.

    Example:
        >>> shards = [Shard(gradient={"w": torch.tensor([value])}, weight=1.0, size=1) for value in (1.0, 2.0)]
        >>> combine(shards, [1.0, 0.5])["w"].tolist()
        [2.0]
    """
    total: dict[str, Tensor] = {}
    for shard, factor in zip(shards, factors, strict=True):
        for name, gradient in shard.gradient.items():
            term = gradient * factor
            total[name] = total[name] + term if name in total else term
    return total


def add_up(shards: Iterable[Shard], buffers: Tensors, per_sample: Container[str] = ()) -> Expected:
    """Return the expected result of a step; the shards are consumed one at a time.

    Args:
        shards: the shards of the step.
        buffers: the buffers before the step.
        per_sample: names of the buffers that hold state per sample.
    """
    total: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    seen: list[Shard] = []
    for shard in shards:
        for name, gradient in shard.gradient.items():
            total[name] = total[name] + gradient if name in total else gradient
            scale[name] = scale.get(name, 0.0) + float(gradient.norm())
        seen.append(Shard(gradient={}, weight=shard.weight, size=shard.size, buffers=shard.buffers))
    weight = sum(shard.weight for shard in seen) or 1.0
    size = sum(shard.size for shard in seen)
    return Expected(
        gradient={name: gradient / weight for name, gradient in total.items()},
        scale={name: value / weight for name, value in scale.items()},
        buffers=averaged_buffers(seen, [shard.size / size for shard in seen], buffers, per_sample),
    )


def averaged_buffers(
    shards: Sequence[Shard], weights: Sequence[float], before: Tensors, per_sample: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the average of the buffers of shards; a counter advances by the average of its advances, and state per
    sample by the changes of all shards.
    """
    found: dict[str, Tensor] = {}
    for name, start in before.items():
        after = [shard.buffers[name] for shard in shards]
        if all(torch.equal(one, start) for one in after):
            found[name] = start
        elif name in per_sample:
            found[name] = start + sum((one - start for one in after), torch.zeros_like(start))
        elif start.is_floating_point():
            found[name] = sum((one * share for one, share in zip(after, weights, strict=True)), torch.zeros_like(start))
        else:
            moved = sum(float((one - start).max()) * share for one, share in zip(after, weights, strict=True))
            found[name] = start + round(moved)
    return found
