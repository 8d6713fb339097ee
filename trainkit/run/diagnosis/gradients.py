"""Hypotheses about gradients and buffers: the effect of each fault on the shards of a step."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import Tensor

from trainkit.run.diagnosis import causes
from trainkit.run.diagnosis.evidence import StepEvidence, Tensors, averaged_buffers, combine
from trainkit.run.diagnosis.matching import Hypothesis


def gradient_hypotheses(step: StepEvidence, *, rate_is_apart: bool = True) -> Iterator[Hypothesis]:
    """Yield (cause, its form, the predicted gradients); several forms of one cause count as one answer.

    Unless `rate_is_apart`, gradients were computed from an update, which a wrong learning rate changes as well.
    """
    yield from _means(step)
    yield from _unreduced(step)
    true = step.gradient
    for factor, words in _copies(step).items():
        yield causes.COUNTED_TWICE, words, {name: grad * factor for name, grad in true.items()}
        yield causes.AVERAGED, words, {name: grad / factor for name, grad in true.items()}
        if not rate_is_apart:
            yield causes.RATE, words, {name: grad * factor for name, grad in true.items()}
            yield causes.RATE, words, {name: grad / factor for name, grad in true.items()}
    yield causes.LAYOUT, "", _misread(true, step)
    if step.drawn_alike is not None:
        shards = step.drawn_alike()
        yield causes.DRAWN_ALIKE, "", combine(shards, [1.0 / step.weight] * len(shards))


def _copies(step: StepEvidence) -> dict[float, str]:
    """Return the factors by which a repeated or averaged sum is wrong."""
    found = {2.0: "", float(step.num_replicas): "", float(len(step.shards)): ""}
    return {factor: f"{factor:g} times" for factor in found if factor > 1}


def _misread(gradient: Tensors, step: StepEvidence) -> dict[str, Tensor]:
    strides = step.strides
    return {name: read_as_contiguous(grad, strides[name]) for name, grad in gradient.items() if name in strides}


def read_as_contiguous(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient that is applied by a kernel which walks the memory of a parameter and of a contiguous
    gradient; unchanged if the strides do not cover one memory range.

    Example:
        >>> import torch
        >>> read_as_contiguous(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1, 2)).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    last = sum((size - 1) * stride for size, stride in zip(gradient.shape, strides, strict=True))
    if gradient.numel() == 0 or last + 1 != prod(gradient.shape):
        return gradient
    return gradient.contiguous().as_strided(gradient.shape, strides)


def _means(step: StepEvidence) -> Iterator[Hypothesis]:
    shards = step.shards
    if any(shard.weight == 0 for shard in shards):
        return
    by_shard = [1.0 / (shard.weight * len(shards)) for shard in shards]
    by_samples = [shard.size / (shard.weight * step.size) for shard in shards]
    replicas = {shard.replica for shard in shards}
    weights = {replica: sum(shard.weight for shard in step.of_replica(replica)) for replica in replicas}
    by_replica = [1.0 / (weights[shard.replica] * len(replicas)) for shard in shards]
    for words, factors in (("", by_shard), ("of replicas", by_replica), ("weighted by samples", by_samples)):
        yield causes.MEAN_OF_MEANS, words, combine(shards, factors)


def _unreduced(step: StepEvidence) -> Iterator[Hypothesis]:
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        own = step.of_replica(replica)
        weight = sum(shard.weight for shard in own)
        for total in {step.weight, weight} - {0.0}:
            yield causes.NOT_REDUCED, f"replica {replica}", combine(own, [1.0 / total] * len(own))


def buffer_hypotheses(step: StepEvidence) -> Iterator[Hypothesis]:
    """Yield (cause, its form, the predicted buffers)."""
    shards = step.shards
    yield causes.BUFFERS_UNWEIGHTED, "", averaged_buffers(shards, [1.0 / len(shards)] * len(shards), step.buffers)
    in_order = list(range(len(shards)))
    if step.in_sequence is not None and len(shards) > 1:
        yield causes.EVERY_SHARD_MOVES, "", step.in_sequence(in_order)
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        own = step.of_replica(replica)
        size = sum(shard.size for shard in own)
        words = f"replica {replica}"
        for total in {size, step.size} - {0}:
            yield causes.BUFFERS_OF_ONE, words, averaged_buffers(own, [s.size / total for s in own], step.buffers)
        if own:
            yield causes.BUFFERS_OF_ONE, words, averaged_buffers(own[-1:], [1.0], step.buffers)
        if step.in_sequence is not None and len(own) > 1:
            places = [place for place in in_order if shards[place].replica == replica]
            yield causes.BUFFERS_OF_ONE, words, step.in_sequence(places)
