"""The transfers between the ranks of a pipeline in a step: activations, their gradients, and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.pipe.forward import Program, TensorMeta
from trainkit.strategies.mesh.pipe.groups import holders_of
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment
from trainkit.strategies.traffic import Flows, Transfer, all_reduce, joined, precision_of

_TRACED: Final = 2
"""Number of samples of the recorded pass."""


def activation_transfers(
    cut: StageAssignment, program: Program, ranks: Sequence[int], context: PlanContext, *, stages: int, count: int
) -> tuple[Transfer, ...]:
    """Return the transfers between neighbouring stages: outputs forward, their gradients backward.

    Args:
        cut: the stages.
        program: the recorded pass of a batch of two samples in training.
        ranks: ranks of all replicas; those of a replica are neighbours.
        context: provides the samples of a shard and the number formats.
        stages: number of ranks of a replica.
        count: number of microbatches of a replica in a step.
    """
    width, scale = precision_of(context).model_dtype, context.micro_size / _TRACED
    pipelines = [ranks[first : first + stages] for first in range(0, len(ranks), stages)]
    forward, backward = list[float](), list[float]()
    starts = program.starts(cut.stage_of, cut.num_stages)
    for first, end in pairwise(starts[:-1]):
        found = program.span(first, end).made
        forward.append(sum(_bytes(one, width) for one in found) * scale)
        backward.append(sum(_bytes(one, width) for one in found if one.requires_grad) * scale)
    return (
        _between(pipelines, forward, "forward", count=count),
        _between(pipelines, backward, "backward", count=count),
    )


def _between(pipelines: Sequence[Sequence[int]], sizes: Sequence[float], way: str, *, count: int) -> Transfer:
    """Return a transfer between the ranks of neighbouring stages, with the bytes per microbatch of each boundary."""
    flows = dict[tuple[int, int], float]()
    for ranks in pipelines:
        for stage, size in enumerate(sizes):
            here, there = ranks[stage % len(ranks)], ranks[(stage + 1) % len(ranks)]
            pair = (here, there) if way == "forward" else (there, here)
            flows[pair] = flows.get(pair, 0.0) + size * count
    messages = count + len(sizes)
    return Transfer(what="activations", how=f"point to point, {way}", flows=flows, messages=messages, overlaps=True)


def _bytes(value: TensorMeta, width: torch.dtype) -> int:
    """Return the bytes of a value; the recorded pass is always in fp32."""
    numel = torch.Size(value.size).numel()
    return numel * (width.itemsize if value.dtype.is_floating_point else value.dtype.itemsize)


def gradient_transfers(
    model: nn.Module, cut: StageAssignment, ranks: Sequence[int], context: PlanContext, *, stages: int
) -> tuple[Transfer, ...]:
    """Return the sums of gradients over the ranks that hold the same parameters."""
    width, holders = precision_of(context).master_dtype.itemsize, holders_of(model, cut, stages)
    by_places = dict[tuple[int, ...], int]()
    for name, param in model.named_parameters():
        if param.requires_grad:
            by_places[holders[name]] = by_places.get(holders[name], 0) + param.numel() * width
    summed: list[Flows] = []
    for places, size in by_places.items():
        group = [ranks[first + place] for first in range(0, len(ranks), stages) for place in places]
        if len(group) > 1:
            summed.append(all_reduce(group, size))
    if not summed:
        return ()
    rounds = 2 * (len(ranks) // stages - 1) or 2
    return (Transfer(what="gradients", how="all-reduce", flows=joined(*summed), messages=rounds * len(summed)),)
