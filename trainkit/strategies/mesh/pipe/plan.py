"""What a plan knows of stages: the pass of a rank on a model without data, and the transfers of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.objectives.base import Loss, Model, Supervised
from trainkit.strategies.base import Batch, PlanContext, PlannedShard, RankPass
from trainkit.strategies.mesh.pipe.forward import Blocks, Program, StageModule, programs_of, trace
from trainkit.strategies.mesh.pipe.stages import StageAssignment, Stages, blocks_to_cut, padded_microbatches
from trainkit.strategies.traffic import Flows, StepCut, Transfer, all_reduce, joined, precision_of


class StagePass(RankPass):
    """Forward and backward of a microbatch through the stages of one rank.

    Like `torch.distributed.pipelining`, it keeps the outputs of a stage until the backward pass of the microbatch, the
    receive buffers of a stage, and the gradients of its inputs until they are sent, during the next microbatch.

    Args:
        cut: the stages of a model with the same names.
        program: the program of a microbatch, in the dtype of a run.
        objective: scores the outputs.
        dtype: the dtype of the parameters of a run.
        stages: the numbers of this rank's stages.
        several: whether a step has more than one microbatch.

    Source: torch 2.13, torch/distributed/pipelining/stage.py and schedules.py (`Schedule1F1B`).
    """

    def __init__(
        self,
        cut: StageAssignment,
        program: Program,
        objective: Supervised,
        dtype: torch.dtype,
        *,
        stages: Sequence[int],
        several: bool,
    ) -> None:
        self._cut, self._program, self._objective, self._dtype = cut, program, objective, dtype
        self._stages, self._several = stages, several
        self._segments: list[StageModule] = []
        self._held: list[Any] = []

    def prepare(self, model: nn.Module) -> None:
        """Create the modules of the stages."""
        units, stage_of = blocks_to_cut(model), self._cut.stage_of
        stages = tuple(stage_of[unit.name] for unit in units)
        cut, device = replace(self._cut, units=units, stages=stages), torch.device("cpu")
        spans = self._program.spans(stage_of, cut.num_stages)
        self._segments = [
            StageModule(Blocks(model, units, cut.members(one)), spans[one], units, model, device)
            for one in self._stages
        ]

    def loss(self, model: nn.Module, batch: Batch, loss: Callable[[Model, Batch], Loss]) -> Loss:  # noqa: ARG002 - the stages compute
        """Run the stages; if a stage is not the last, backward starts with received gradients."""
        inputs, targets = self._objective.split_batch(batch)
        total: Tensor | float = 0.0
        for segment in self._segments:
            segment.set_inputs(tree_map(self._cast, inputs))
            total = total + self._computed(segment, targets)
        assert isinstance(total, Tensor)
        return Loss(loss_sum=total, weight=1.0)

    def _cast(self, leaf: Any) -> Any:
        """Cast an input of the model, like its own forward."""
        is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and self._dtype is not torch.float32
        return leaf.to(self._dtype) if is_cast else leaf

    def _computed(self, segment: StageModule, targets: Any) -> Tensor:
        """Return the loss of the last stage, or a number whose backward pass gives the received gradients to the
        outputs.
        """
        device, is_last = torch.device("cpu"), segment.span.is_last
        received = [one.meta.empty(device) for one in segment.span.received]
        self.received_bytes += _num_bytes(received)
        if self._several:  # the gradients of the previous microbatch, which are being sent
            sent = [torch.empty_like(one) for one in received if one.requires_grad]
            self.once_bytes += _num_bytes(sent)
            self._held.append(sent)
        # the schedule replaces the outputs of the previous microbatch after the forward pass
        previous = [one.empty(device) for one in self._program.finals] if is_last and self._several else []
        outputs = segment(*received)
        previous.clear()
        self._held.append(outputs)
        if is_last:
            found = self._objective.score(self._program.filled(outputs), targets)
            return found.loss_sum if found.extra is None else found.loss_sum + found.extra
        if self._several:  # the schedule keeps the work of its first send alive, with the sent tensor
            first = [torch.empty_like(one) for one in outputs]
            self.once_bytes += _num_bytes(first)
            self._held.append(first)
        buffers = [torch.empty_like(one) for one in outputs if one.requires_grad]
        self.received_bytes += _num_bytes(buffers)
        total: Tensor = _Received.apply(buffers, *[one for one in outputs if one.requires_grad])  # type: ignore[no-untyped-call]
        return total


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


class _Received(torch.autograd.Function):
    """Starts the backward pass of tensors with gradients received from another rank."""

    @staticmethod
    def forward(ctx: Any, buffers: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """Return () zero."""
        ctx.buffers = buffers
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - of zero
        """Return the received gradients."""
        return None, *ctx.buffers


def stage_passes(stages: Stages, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[StagePass, ...]:
    """Return the pass of each rank through its stages; none if the map does not fit."""
    precision, objective = precision_of(context), context.objective
    cut, dtype = stages.assigned(model, precision, context), precision.model_dtype
    if not isinstance(cut, StageAssignment) or not isinstance(objective, Supervised):
        return ()
    inputs = objective.split_batch(shard.batch)[0]
    program = trace(model, cut.units, inputs, device=torch.device("cpu"), autocast=precision.autocast(["cpu"]))
    program = program if dtype is torch.float32 else program.in_dtype(dtype)
    several = padded_microbatches(stages.schedule, shard.count, stages.pipe) > 1
    return tuple(
        StagePass(cut, program, objective, dtype, stages=range(place, cut.num_stages, stages.pipe), several=several)
        for place in range(stages.pipe)
    )


_TRACED: Final = 2
"""Number of samples of the recorded pass."""


def stage_transfers(
    stages: Stages, model: nn.Module, ranks: Sequence[int], context: PlanContext, cut: StepCut
) -> tuple[Transfer, ...] | None:
    """Return the transfers of a step: outputs of stages forward, their gradients backward, and sums of gradients over
    the ranks that hold the same parameters; None if the model is not known.

    Args:
        stages: the stages.
        model: the model.
        ranks: ranks of all replicas; those of a replica are neighbours.
        context: provides the samples of a shard and the number formats.
        cut: the shards of a step.
    """
    precision = precision_of(context)
    assigned, programs = stages.assigned(model, precision, context), programs_of(model, blocks_to_cut(model), context)
    if not isinstance(assigned, StageAssignment) or isinstance(programs, list) or not programs:
        return None
    width, scale = precision.model_dtype.itemsize, context.micro_size / _TRACED
    pipelines = [ranks[first : first + stages.pipe] for first in range(0, len(ranks), stages.pipe)]
    count, found = padded_microbatches(stages.schedule, cut.shards_a_replica, stages.pipe), list[Transfer]()
    spans = programs[0].spans(assigned.stage_of, assigned.num_stages)[:-1]
    for way in ("forward", "backward"):
        flows = dict[tuple[int, int], float]()
        for stage, span in enumerate(spans):
            size = sum(  # the recorded pass is always in fp32
                prod(one.size) * (width if one.dtype.is_floating_point else one.dtype.itemsize)
                for one in span.made
                if way == "forward" or one.requires_grad
            )
            for of_replica in pipelines:
                here, there = of_replica[stage % stages.pipe], of_replica[(stage + 1) % stages.pipe]
                pair = (here, there) if way == "forward" else (there, here)
                flows[pair] = flows.get(pair, 0.0) + size * scale * count
        how, messages = f"point to point, {way}", count + len(spans)
        found.append(Transfer(what="activations", how=how, flows=flows, messages=messages, overlaps=True))
    by_places, holders = dict[tuple[int, ...], int](), assigned.holders(model, stages.pipe)
    for name, param in model.named_parameters():
        if param.requires_grad:
            size = param.numel() * precision.master_dtype.itemsize
            by_places[holders[name]] = by_places.get(holders[name], 0) + size
    summed: list[Flows] = []
    for places, size in by_places.items():
        group = [of_replica[place] for of_replica in pipelines for place in places]
        if len(group) > 1:
            summed.append(all_reduce(group, size))
    if summed:
        rounds = 2 * (len(pipelines) - 1) or 2
        messages = rounds * len(summed)
        found.append(Transfer(what="gradients", how="all-reduce", flows=joined(*summed), messages=messages))
    return tuple(found)
