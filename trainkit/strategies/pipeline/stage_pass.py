"""The pass of a rank of a pipeline, on a model without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trainkit.objectives.base import Loss, Model, Supervised
from trainkit.strategies.base import Batch, RankPass
from trainkit.strategies.pipeline.stage_assignment import StageAssignment, blocks_to_cut
from trainkit.strategies.pipeline.tracing.program import Program, StageProgram
from trainkit.strategies.pipeline.tracing.stage_module import StageModule, blocks_of_stage, filled


@dataclass(frozen=True, kw_only=True)
class RecordedStages:
    """The recorded computation of the stages of a model for a microbatch."""

    program: Program
    stretches: Sequence[StageProgram]
    """The program of each stage."""
    stage_of: Mapping[str, int]
    """Block -> stage."""
    objective: Supervised
    dtype: torch.dtype
    """The dtype of the parameters of a run."""

    def assigned(self, model: nn.Module) -> StageAssignment:
        """Return the stages of a copy of the model."""
        units = blocks_to_cut(model)
        stages = tuple(self.stage_of[unit.name] for unit in units)
        return StageAssignment(units=units, stages=stages, num_stages=len(self.stretches))

    @classmethod
    def of(cls, program: Program, cut: StageAssignment, *, objective: Supervised, dtype: torch.dtype) -> RecordedStages:
        """Return the stages of a program.

        Args:
            program: the program of a microbatch, recorded with a model in float32.
            cut: the stages of that model.
            objective: the objective, which scores the outputs.
            dtype: the dtype of the parameters of a run.
        """
        shapes = program.shapes
        if dtype is not torch.float32:
            shapes = {
                number: replace(one, dtype=dtype) if one.dtype is torch.float32 else one
                for number, one in shapes.items()
            }
        program = replace(program, shapes=shapes)
        stretches = program.cut(cut.stage_of, cut.num_stages)
        return cls(program=program, stretches=stretches, stage_of=cut.stage_of, objective=objective, dtype=dtype)


class StagePass(RankPass):
    """Forward and backward of a microbatch through the stages of one rank.

    Like `torch.distributed.pipelining`, it keeps the outputs of a stage until the backward pass of the microbatch, the
    receive buffers of a stage, and the gradients of its inputs until they are sent, during the next microbatch.

    Args:
        recorded: the stages.
        stages: the numbers of this rank's stages.
        several: whether a step has more than one microbatch.

    Source: torch 2.13, torch/distributed/pipelining/stage.py and schedules.py (`Schedule1F1B`).
    """

    def __init__(self, recorded: RecordedStages, stages: Sequence[int], *, several: bool) -> None:
        self._recorded, self._stages, self._several = recorded, stages, several
        self._segments: dict[int, StageModule] = {}
        self._held: list[Any] = []

    def prepare(self, model: nn.Module) -> None:
        """Create the modules of the stages."""
        found, cut = self._recorded, self._recorded.assigned(model)
        self._segments = {
            stage: StageModule(blocks_of_stage(model, cut, stage), found.stretches[stage], found.program.shapes)
            for stage in self._stages
        }

    def loss(self, model: nn.Module, batch: Batch, loss: Callable[[Model, Batch], Loss]) -> Loss:  # noqa: ARG002 - the stages compute
        """Run the stages; if a stage is not the last, backward starts with received gradients."""
        inputs, targets = self._recorded.objective.split_batch(batch)
        tensors = [self._cast(leaf) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
        total: Tensor | float = 0.0
        for stage, segment in self._segments.items():
            segment.set_inputs(tensors)
            total = total + self._computed(stage, segment, targets)
        assert isinstance(total, Tensor)
        return Loss(loss_sum=total, weight=1.0)

    def _cast(self, leaf: Tensor) -> Tensor:
        """Cast an input of the model, like its own forward."""
        dtype = self._recorded.dtype
        return leaf.to(dtype) if leaf.is_floating_point() and dtype is not torch.float32 else leaf

    def _computed(self, stage: int, segment: StageModule, targets: Any) -> Tensor:
        """Return the loss of the last stage, or a number whose backward pass gives the received gradients to the
        outputs.
        """
        program = self._recorded.program
        is_last = stage == len(self._recorded.stretches) - 1
        received = self._received(stage)
        previous = self._previous_outputs() if is_last and self._several else []
        outputs = segment(*received)
        previous.clear()
        self._held.append(outputs)
        if is_last:
            leaves = dict(zip(program.finals(), outputs, strict=True))
            found = self._recorded.objective.score(filled(program.outputs, leaves, {}), targets)
            return found.loss_sum if found.extra is None else found.loss_sum + found.extra
        if self._several:  # the schedule keeps the work of its first send alive, with the sent tensor
            first = [torch.empty_like(one) for one in outputs]
            self.once_bytes += _num_bytes(first)
            self._held.append(first)
        buffers = [torch.empty_like(one) for one in outputs if one.requires_grad]
        self.received_bytes += _num_bytes(buffers)
        sent: Tensor = _Received.apply(buffers, *[one for one in outputs if one.requires_grad])  # type: ignore[no-untyped-call]
        return sent

    def _received(self, stage: int) -> list[Tensor]:
        """Return the inputs of a stage, and allocate the gradients of the previous microbatch, which are being sent."""
        shapes, found = self._recorded.program.shapes, []
        for number in self._recorded.stretches[stage].received:
            one = shapes[number].empty(torch.device("cpu"))
            found.append(one.requires_grad_(one.is_floating_point() or one.is_complex()))
        self.received_bytes += _num_bytes(found)
        if self._several:
            sent = [torch.empty_like(one) for one in found if one.requires_grad]
            self.once_bytes += _num_bytes(sent)
            self._held.append(sent)
        return found

    def _previous_outputs(self) -> list[Tensor]:
        """Allocate the outputs of the previous microbatch, which the schedule replaces after the forward pass."""
        program = self._recorded.program
        return [program.shapes[number].empty(torch.device("cpu")) for number in program.finals()]


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
