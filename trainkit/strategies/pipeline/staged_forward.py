"""Call the model of a pipeline: its stages run one after the other, and the outputs are sent to every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainkit.strategies.pipeline.replica import PipelineReplica
from trainkit.strategies.pipeline.tracing.program import Program
from trainkit.strategies.pipeline.tracing.recorder import is_fake
from trainkit.strategies.pipeline.tracing.stage_module import filled

__all__ = ["StagedForward"]


class StagedForward:
    """The forward pass of a staged model, which replaces its own: `model.forward = StagedForward(replica)`.

    For evaluation and sampling: one batch at a time, without gradients. Collective over the ranks of a replica; all
    pass the same inputs, and receive the outputs. A trace, whose tensors have no data, runs the model's own forward.
    """

    def __init__(self, replica: PipelineReplica) -> None:
        self._replica, self._whole = replica, replica.model.forward

    def __call__(self, inputs: Any) -> Any:
        """Run the model on its inputs."""
        if any(map(is_fake, tree_flatten(inputs)[0])):
            return self._whole(inputs)
        replica = self._replica
        with torch.no_grad():
            traced = replica.trace(inputs)
        program, last = traced.program, replica.cut.num_stages - 1
        tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
        outputs: tuple[Tensor, ...] = ()
        # The recorded program itself sets the random keys of the model's own code.
        with torch.no_grad(), replica.keys.at(replica.keys.beginning):
            for stage in replica.stages_here:
                received = self._received(program, traced.stretches[stage].received, stage)
                traced.segments[stage].set_inputs(tensors)
                outputs = traced.segments[stage](*received)
                if stage < last:
                    self._send(outputs, stage + 1)
            finals = self._broadcast(program, outputs)
        return filled(program.outputs, dict(zip(program.finals(), finals, strict=True)), {})

    def _received(self, program: Program, numbers: tuple[int, ...], stage: int) -> list[Tensor]:
        group, ranks = self._replica.groups.replica, self._replica.num_stage_ranks
        tensors = [program.shapes[number].empty(self._replica.device) for number in numbers]
        for tensor in tensors:
            dist.recv(tensor, group=group, group_src=(stage - 1) % ranks)
        return tensors

    def _send(self, tensors: tuple[Tensor, ...], stage: int) -> None:
        for tensor in tensors:
            dist.send(tensor, group=self._replica.groups.replica, group_dst=stage % self._replica.num_stage_ranks)

    def _broadcast(self, program: Program, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Broadcast the outputs of the last stage to every rank."""
        replica = self._replica
        is_last = replica.place == replica.num_stage_ranks - 1
        found = []
        for at, number in enumerate(program.finals()):
            tensor = outputs[at] if is_last else program.shapes[number].empty(replica.device)
            dist.broadcast(tensor, group=replica.groups.replica, group_src=replica.num_stage_ranks - 1)
            found.append(tensor)
        return found
