"""Pipelines: the stages of a model on the ranks of a replica, with the shards of a step as microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from torch import nn

from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import ConfigError, Problem
from trainkit.fields import above, at_least, at_most, placement
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access, Supervised
from trainkit.strategies.base import (
    Facts,
    ModelMemory,
    PlanContext,
    PlannedShard,
    RankPass,
    ReplicaPart,
    SetupRequest,
    StagePart,
    Strategy,
)
from trainkit.strategies.collectives import RankGroup
from trainkit.strategies.core.refusals import counted_statistics_problems
from trainkit.strategies.core.step import sparse_problems
from trainkit.strategies.core.synchronous import build_parts, no_reducer
from trainkit.strategies.groups.process_group import ProcessGroupOptions
from trainkit.strategies.maps.layout import MemoryLimits, activations_of, model_bytes, part_of
from trainkit.strategies.maps.syntax import names_of
from trainkit.strategies.mesh.pipe.forward import programs_of, trace
from trainkit.strategies.mesh.pipe.schedules import (
    ScheduleName,
    ideal_bubble,
    most_in_flight,
    padded_microbatches,
    several_a_rank,
)
from trainkit.strategies.mesh.pipe.stage_assignment import (
    StageAssignment,
    blocks_to_cut,
    cut_blocks,
    exceeded_limits,
    names_parts,
)
from trainkit.strategies.mesh.pipe.validation import misfits, sending_problems, version_problems
from trainkit.strategies.traffic import StepCut, Transfer, WorkShare, precision_of, ranks_of

if TYPE_CHECKING:
    from trainkit.strategies.mesh.layout import Layout, OnMesh
    from trainkit.strategies.mesh.pipe.executor import PipelineExecutor


@dataclass(frozen=True, kw_only=True)
class Pipeline(ProcessGroupOptions, Strategy):
    """Train each stage of a replica on its own rank, with the shards of a step as microbatches.

    Example:
        >>> strategy, context = Pipeline(stages=4, replicas=2), PlanContext()
        >>> strategy.num_replicas(context), len(strategy.tasks(context))
        (2, 8)
    """

    facts: ClassVar[Facts] = Facts(place=4, supports_meta_init=True, is_sharded=True, forward_is_collective=True)

    replicas: Annotated[int | Literal["auto"], placement, at_most(MOST_PROCESSES)] = 1
    """Copies of the whole pipeline, over all hosts; auto: those that the GPUs of this host or a launch make up."""
    stages: Annotated[int, at_least(2), at_most(MOST_PROCESSES), placement] = 2
    """Number of ranks of a replica."""
    schedule: Annotated[ScheduleName, placement] = "1f1b"
    """The order in which a rank computes microbatches; interleaved and zero_bubble may have several stages per rank."""
    virtual_stages: Annotated[int | None, at_least(1), at_most(MOST_PROCESSES), placement] = None
    """Stages of each rank, `stages` apart in the model; null: 2 if the schedule is interleaved, else 1."""
    map: Annotated[Mapping[str, int | str] | Literal["auto"], placement] = "auto"
    """Module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a stage; `auto`: balanced by bytes."""

    max_memory: Annotated[Annotated[float, above(0)] | Mapping[str, float] | None, placement] = None
    """GiB of parameters, gradients, buffers and a shard's activations that a rank takes: for all, or `{0:20,1:40}`."""

    @property
    def ranks_a_replica(self) -> int:
        """The ranks of the stages."""
        return self.stages

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: an objective gets the outputs alone, and no rank has the whole model."""
        reason = (
            "a pipeline has outputs on its last stage only. Use a Supervised objective that keeps the default `loss`."
        )
        return replace(
            super().facts_in(context),
            shards_per_replica=4 * self.stages,  # the bubble is below a fifth of a step: Huang et al. 2019, section 2.3
            withheld=dict.fromkeys(Access, reason),
        )

    @property
    def loss_rank(self) -> int:
        """The last rank: it has the last stage, and so the loss."""
        return self.stages - 1

    @property
    def stages_a_rank(self) -> int:
        """Number of stages of each rank."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.stages * self.stages_a_rank

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: schedules that do not fit the stages, and those of every process group."""
        return self.stage_problems(context) or super().validate(context)

    def stage_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems of the keys of stages."""
        found = [*version_problems(torch.__version__), *sending_problems(context.num_gpus)]
        if several_a_rank(self.schedule) is False and self.stages_a_rank > 1:
            rule = f"schedule={self.schedule} has one stage per rank. Use interleaved, or leave it out."
            found.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if self.schedule == "interleaved" and self.stages_a_rank == 1:
            rule = "interleaves nothing. Use 2 or more, or schedule=1f1b."
            found.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if context.numerics.reproducible:
            rule = "does not work with a pipeline, which sums in its own order. Leave it out."
            found.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if isinstance(context.objective, Supervised) and isinstance(context.objective.input, list | tuple):
            rule = "names several fields, and a pipeline passes its model one. Name one, or use another strategy."
            found.append(Problem(key="objective.input", value=context.objective.input, rule=rule))
        if self.map == {}:
            rule = "places nothing. Name modules and their stages, {embed:0,rest:1}, or use auto."
            found.append(Problem(key="strategy.map", value="{}", rule=rule))
        return found + self._limits.problems()

    @property
    def _limits(self) -> MemoryLimits:
        return MemoryLimits(given=self.max_memory, names=[str(rank) for rank in range(self.stages)], noun="rank")

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of the map for this model, and of the model for a pipeline."""
        cut = self._cut(model, context.precision, context)
        if not isinstance(cut, StageAssignment):
            return cut
        sparse = sparse_problems(model, "which are not summed")
        sparse += counted_statistics_problems(
            model, context, because="a rank of a pipeline has those of its stages only"
        )
        return self._exceeded(model, cut, context) or sparse or self._misfits(model, cut, context)

    def _misfits(self, model: nn.Module, cut: StageAssignment, context: PlanContext) -> list[Problem]:
        """Return the problems of running the model in these stages, with the map of `auto` if that one works."""
        programs = programs_of(model, blocks_to_cut(model), context)
        if isinstance(programs, list):
            return programs
        better = self._cut_by(None, model, context.precision, context)
        return misfits(cut, programs) and misfits(
            cut, programs, better=better if isinstance(better, StageAssignment) else None
        )

    def _exceeded(self, model: nn.Module, cut: StageAssignment, context: PlanContext) -> list[Problem]:
        if self.max_memory is None:
            return []
        precision = Precision(value=context.precision)  # type: ignore[arg-type]
        kept = activations_of(model, cut.units, context, precision)
        return exceeded_limits(self._limits, cut, model_bytes(precision), kept)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return the stages of the first replica."""
        cut = self._cut(model, context.precision, context)
        if not isinstance(cut, StageAssignment):
            return ()
        bytes_of = model_bytes(Precision(value=context.precision))  # type: ignore[arg-type]
        devices = [task.device for task in self.tasks(replace(context, launch=None))]
        return tuple(
            part_of(stage, cut.members(stage), bytes_of, devices[stage % self.stages])
            for stage in range(cut.num_stages)
        )

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return one replica, with a stage on each device."""
        return {"replicas": 1, **cls.sharded_over(count)}

    @classmethod
    def sharded_over(cls, count: int) -> dict[str, int]:
        """Return the number of stages, each on a device."""
        return {"stages": count}

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of the rank with the largest use, and a flat vector for the exchange between replicas."""
        parts = self._stage_parts(model, context, num_shards=1)
        if not parts:
            return ModelMemory.whole(model, gradient_copies=0 if self.num_replicas(context) == 1 else 1)
        return max((part.memory for part in parts), key=lambda memory: sum(memory.resident.values()))

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:
        """Return the stages of each rank, and its number of microbatches in flight; one part if no map fits."""
        parts = self._stage_parts(model, context, num_shards=num_shards)
        return parts or super().replica_parts(model, context, num_shards=num_shards)

    def _stage_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:
        from trainkit.strategies.mesh.pipe.groups import holders_of  # noqa: PLC0415 - torch.distributed

        cut = self._cut(model, context.precision, context)
        if not isinstance(cut, StageAssignment):
            return ()
        copies = 0 if self.num_replicas(context) == 1 else 1
        holders = holders_of(model, cut, self.stages)
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        return tuple(
            ReplicaPart(
                modules=names_of(
                    model,
                    [
                        entry
                        for unit, stage in zip(cut.units, cut.stages, strict=True)
                        if stage % self.stages == place
                        for entry in unit.entries
                    ],
                ),
                memory=ModelMemory(
                    resident={name: size for name, size in sizes.items() if place in holders[name]},
                    gradient_copies=copies,
                ),
                received=padded_microbatches(self.schedule, num_shards, self.stages),
                in_flight=most_in_flight(
                    self.schedule, num_shards, place=place, num_ranks=self.stages, stages_a_rank=self.stages_a_rank
                ),
            )
            for place in range(self.stages)
        )

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:
        """Return the pass of each rank through its stages; none if the map does not fit."""
        from trainkit.strategies.mesh.pipe.stage_pass import RecordedStages, StagePass  # noqa: PLC0415 - as above

        cut, objective, precision = (
            self._cut(model, context.precision, context),
            context.objective,
            precision_of(context),
        )
        if not isinstance(cut, StageAssignment) or not isinstance(objective, Supervised):
            return ()
        inputs = objective.split_batch(shard.batch)[0]
        device = torch.device("cpu")
        program = trace(model, cut.units, inputs, device=device, autocast=precision.autocast(["cpu"]))
        recorded = RecordedStages(
            program=program if precision.model_dtype is torch.float32 else program.in_dtype(precision.model_dtype),
            stage_of=cut.stage_of,
            num_stages=cut.num_stages,
            objective=objective,
            dtype=precision.model_dtype,
        )
        several = padded_microbatches(self.schedule, shard.count, self.stages) > 1
        return tuple(
            StagePass(recorded, range(place, cut.num_stages, self.stages), several=several)
            for place in range(self.stages)
        )

    def work_share(self, cut: StepCut) -> WorkShare:
        """Return the share for equal stages, with the ideal bubble of the schedule."""
        count = padded_microbatches(self.schedule, cut.shards_a_replica, self.stages)
        return WorkShare(operations=count / cut.shards_a_replica / self.stages / (1 - self.bubble(cut)))

    def bubble(self, cut: StepCut) -> float:
        """Return the ideal bubble of the schedule."""
        count = padded_microbatches(self.schedule, cut.shards_a_replica, self.stages)
        return ideal_bubble(self.schedule, count, num_ranks=self.stages, stages_a_rank=self.stages_a_rank)

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the activations between stages and their gradients, and the sums of gradients over the replicas."""
        from trainkit.strategies.mesh.pipe.transfers import activation_transfers, gradient_transfers  # noqa: PLC0415

        assigned, programs = (
            self._cut(model, context.precision, context),
            programs_of(model, blocks_to_cut(model), context),
        )
        if not isinstance(assigned, StageAssignment) or isinstance(programs, list) or not programs:
            return None
        ranks = ranks_of(self, context)
        count = padded_microbatches(self.schedule, cut.shards_a_replica, self.stages)
        sent = activation_transfers(assigned, programs[0], ranks, context, stages=self.stages, count=count)
        return (*sent, *gradient_transfers(model, assigned, ranks, context, stages=self.stages))

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Pipeline:
        """Return the strategy with a stage for each block: activations and the order of blocks are known only here."""
        model = build()
        if isinstance(self.map, Mapping) and not names_parts(model, self.map):
            return self
        cut = self._cut(model, context.precision, context)
        if not isinstance(cut, StageAssignment):
            raise ConfigError(cut)
        return replace(self, map={unit.name: stage for unit, stage in zip(cut.units, cut.stages, strict=True)})

    def assigned(self, model: nn.Module, context: PlanContext) -> StageAssignment | list[Problem]:
        """Return the stage of each block, or the problems of the map."""
        return self._cut(model, context.precision, context)

    def stage_names(self, model: nn.Module, cut: StageAssignment) -> list[set[str]]:
        """Return the names of the tensors of each rank."""
        from trainkit.strategies.mesh.pipe.groups import holders_of  # noqa: PLC0415 - torch.distributed

        holders = holders_of(model, cut, self.stages)
        return [{name for name, places in holders.items() if place in places} for place in range(self.stages)]

    def _cut(self, model: nn.Module, value: str, context: PlanContext | None = None) -> StageAssignment | list[Problem]:
        return self._cut_by(self.map if isinstance(self.map, Mapping) else None, model, value, context)

    def _cut_by(
        self, given: Mapping[str, int | str] | None, model: nn.Module, value: str, context: PlanContext | None
    ) -> StageAssignment | list[Problem]:
        precision = Precision(value=value)  # type: ignore[arg-type]
        programs = () if context is None else programs_of(model, blocks_to_cut(model), context)
        return cut_blocks(
            model,
            given,
            num_stages=self.num_stages,
            precision=precision,
            context=context,
            programs=() if isinstance(programs, list) else programs,
        )

    def setup(self, request: SetupRequest) -> PipelineExecutor:
        """Join the other ranks, and keep the stages of this one; collective.

        Raises:
            ConfigError: the map does not fit the model.
        """
        from trainkit.strategies.mesh.layout import Layout  # noqa: PLC0415 - torch.distributed
        from trainkit.strategies.mesh.sharding import Axes  # noqa: PLC0415 - torch.distributed

        axes = Axes(replicate=request.identity.num_ranks // self.stages, pipe=self.stages)
        return self.setup_on(request, self.join(request.identity), Layout(axes=axes), None)

    def setup_on(
        self, request: SetupRequest, ranks: RankGroup, layout: Layout, place: OnMesh | None
    ) -> PipelineExecutor:
        """Keep the stages of this rank; collective.

        Args:
            request: the model and the settings of the run.
            ranks: the ranks, which have joined.
            layout: the way in which a stage is cut.
            place: the place of this rank, if stages are cut; None: they are whole.

        Raises:
            ConfigError: the map does not fit the model.
        """
        from trainkit.strategies.mesh.pipe.executor import PipelineExecutor, PipelineWork, assemble  # noqa: PLC0415 - heavy
        from trainkit.strategies.mesh.pipe.groups import holders_of  # noqa: PLC0415 - torch.distributed
        from trainkit.strategies.mesh.pipe.held import HeldStages  # noqa: PLC0415 - torch.distributed

        model, task = request.model, request.identity.task
        cut = self._cut(model, request.precision.value)
        if not isinstance(cut, StageAssignment):
            raise ConfigError(cut)
        holders = holders_of(model, cut, self.stages)
        held = HeldStages(cut=cut, axes=layout.axes, rank=task.rank, holders=holders, layout=layout, place=place)
        kept = held.params(torch.device(task.device))
        parts = build_parts(request, ranks=ranks, placement=kept, make_reducer=no_reducer, move=held.move)
        replica = assemble(parts, held, schedule=self.schedule, timeout_s=self.timeout_s)
        return PipelineExecutor(replica, request.training, ranks=ranks, make_step=PipelineWork)
