"""From a model that keeps this rank's tensors to what the rank works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.replica import ReplicaParts
from trainkit.strategies.pipeline.groups import holders_of, meet
from trainkit.strategies.pipeline.replica import PipelineReplica, StageLayout
from trainkit.strategies.pipeline.schedules import ScheduleName
from trainkit.strategies.pipeline.stage_assignment import StageAssignment
from trainkit.strategies.pipeline.staged_forward import StagedForward
from trainkit.strategies.pipeline.tracing.stage_module import Blocks

__all__ = ["assemble"]


def assemble(parts: ReplicaParts, cut: StageAssignment, *, stages: int, schedule: ScheduleName) -> PipelineReplica:
    """Make the replica of one rank, and let a call of its model go through all stages; collective.

    Args:
        parts: what every replica has; other stages' tensors of the model are on the meta device.
        cut: the stage of each block.
        stages: ranks of a replica.
        schedule: how microbatches flow.
    """
    everyone, model = parts.all_ranks, parts.held.model
    place = everyone.rank % stages
    holders = holders_of(model, cut, stages)
    blocks = {stage: _blocks(model, cut, stage) for stage in range(place, cut.num_stages, stages)}
    buffers = StepBuffers(nn.ModuleList(blocks.values()), parts.precision.master_dtype)
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    here = nn.ModuleList(blocks.values()).named_buffers()
    layout = StageLayout(
        cut=cut,
        num_stage_ranks=stages,
        place=place,
        schedule=schedule,
        groups=meet(holders, stages=stages, replicas=everyone.num_ranks // stages, rank=everyone.rank),
        holders=holders,
        blocks=blocks,
        buffer_names=[names[id(buffer)] for _, buffer in here],
    )
    replica = PipelineReplica(replace(parts, buffers=buffers), layout)
    model.forward = StagedForward(replica)
    return replica


def _blocks(model: nn.Module, cut: StageAssignment, stage: int) -> Blocks:
    inside = {id(tensor) for unit in cut.units for _, tensor in unit.tensors()}
    owned = {name: tensor for name, tensor in _named(model) if id(tensor) not in inside}
    members = cut.members(stage)
    here = {id(tensor) for unit in members for _, tensor in unit.tensors()}
    within = {name: tensor for name, tensor in _named(model) if id(tensor) in here}
    return Blocks({unit.name: unit.entries[0] for unit in members}, owned=owned, inside=within)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
