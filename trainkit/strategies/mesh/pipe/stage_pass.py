"""The pass of a rank of a pipeline, on a model without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.objectives.base import Loss, Model, Supervised
from trainkit.strategies.base import Batch, RankPass
from trainkit.strategies.mesh.pipe.forward import Program
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment, blocks_to_cut
from trainkit.strategies.mesh.pipe.stage_module import Blocks, StageModule


@dataclass(frozen=True, kw_only=True)
class RecordedStages:
    """The recorded computation of the stages of a model for a microbatch."""

    program: Program
    """The program of a microbatch, in the dtype of a run."""
    stage_of: Mapping[str, int]
    """Block -> stage."""
    num_stages: int
    objective: Supervised
    dtype: torch.dtype
    """The dtype of the parameters of a run."""


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
        found, units = self._recorded, blocks_to_cut(model)
        stages = tuple(found.stage_of[unit.name] for unit in units)
        cut = StageAssignment(units=units, stages=stages, num_stages=found.num_stages)
        starts = found.program.starts(cut.stage_of, cut.num_stages)
        self._segments = {
            stage: StageModule(
                Blocks(model, cut, stage),
                found.program.span(starts[stage], starts[stage + 1]),
                cut,
                model,
                torch.device("cpu"),
            )
            for stage in self._stages
        }

    def loss(self, model: nn.Module, batch: Batch, loss: Callable[[Model, Batch], Loss]) -> Loss:  # noqa: ARG002 - the stages compute
        """Run the stages; if a stage is not the last, backward starts with received gradients."""
        inputs, targets = self._recorded.objective.split_batch(batch)
        cast = tree_map(self._cast, inputs)
        total: Tensor | float = 0.0
        for segment in self._segments.values():
            segment.set_inputs(cast)
            total = total + self._computed(segment, targets)
        assert isinstance(total, Tensor)
        return Loss(loss_sum=total, weight=1.0)

    def _cast(self, leaf: Any) -> Any:
        """Cast an input of the model, like its own forward."""
        dtype = self._recorded.dtype
        is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point() and dtype is not torch.float32
        return leaf.to(dtype) if is_cast else leaf

    def _computed(self, segment: StageModule, targets: Any) -> Tensor:
        """Return the loss of the last stage, or a number whose backward pass gives the received gradients to the
        outputs.
        """
        program, is_last = self._recorded.program, segment.span.is_last
        received = self._received(segment)
        previous = self._previous_outputs() if is_last and self._several else []
        outputs = segment(*received)
        previous.clear()
        self._held.append(outputs)
        if is_last:
            found = self._recorded.objective.score(program.filled(outputs), targets)
            return found.loss_sum if found.extra is None else found.loss_sum + found.extra
        if self._several:  # the schedule keeps the work of its first send alive, with the sent tensor
            first = [torch.empty_like(one) for one in outputs]
            self.once_bytes += _num_bytes(first)
            self._held.append(first)
        buffers = [torch.empty_like(one) for one in outputs if one.requires_grad]
        self.received_bytes += _num_bytes(buffers)
        sent: Tensor = _Received.apply(buffers, *[one for one in outputs if one.requires_grad])  # type: ignore[no-untyped-call]
        return sent

    def _received(self, segment: StageModule) -> list[Tensor]:
        """Return the inputs of a stage, and allocate the gradients of the previous microbatch, which are being sent."""
        found = [one.meta.empty(torch.device("cpu")) for one in segment.span.received]
        self.received_bytes += _num_bytes(found)
        if self._several:
            sent = [torch.empty_like(one) for one in found if one.requires_grad]
            self.once_bytes += _num_bytes(sent)
            self._held.append(sent)
        return found

    def _previous_outputs(self) -> list[Tensor]:
        """Allocate the outputs of the previous microbatch, which the schedule replaces after the forward pass."""
        return [one.empty(torch.device("cpu")) for one in self._recorded.program.finals]


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
