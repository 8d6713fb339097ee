"""Pipelines: the stages of a model on the ranks of a replica, and shards that flow through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.config.values import MOST_PROCESSES, above, at_least, at_most
from trainkit.errors import ConfigError, Problem
from trainkit.fields import placement
from trainkit.numerics.batch import Ticket
from trainkit.numerics.deferred import lazy_init_values
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Collective, Supervised
from trainkit.strategies.base import Numerics, PlanContext, StagePart, StepContext
from trainkit.strategies.core.replica import PlacedModel, Replica, replica_state, restore_replica
from trainkit.strategies.core.sparse import sparse_problems
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.groups.process_group import ProcessGroupStrategy
from trainkit.strategies.partition.activations import activations_in
from trainkit.strategies.partition.solver import model_bytes
from trainkit.strategies.partition.syntax import collapsed
from trainkit.strategies.pipeline.memory_limits import Limits
from trainkit.strategies.pipeline.schedules import ScheduleName, several_a_rank
from trainkit.strategies.pipeline.stage_assignment import StageAssignment, cut_blocks, names_parts
from trainkit.strategies.pipeline.stage_params import StageParams
from trainkit.strategies.pipeline.tracing.trial import programs_of
from trainkit.strategies.pipeline.validation import misfits
from trainkit.strategies.reducers import LocalReducer, Reducer
from trainkit.strategies.tensors.lazy_state import name_in, select
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard, gather_full

__all__ = ["Pipeline"]


@dataclass(frozen=True, kw_only=True)
class Pipeline(ProcessGroupStrategy):
    """Train stages of one replica on a rank each, with the shards of a step as microbatches.

    Example:
        >>> strategy, context = Pipeline(stages=4, replicas=2), PlanContext()
        >>> strategy.num_replicas(context), len(strategy.tasks(context))
        (2, 8)
    """

    holds_pieces: ClassVar[bool] = True
    computes_together: ClassVar[bool] = True
    defers: ClassVar[bool] = True

    replicas: Annotated[int | Literal["auto"], placement, at_most(MOST_PROCESSES)] = 1
    """Copies of the whole pipeline; auto: as many as the GPUs of this host make up; in a launch, its ranks."""
    stages: Annotated[int, at_least(2), at_most(MOST_PROCESSES), placement] = 2
    """Ranks of a replica."""
    schedule: Annotated[ScheduleName, placement] = "1f1b"
    """The order in which a rank computes microbatches; interleaved and zero_bubble may have several stages a rank."""
    virtual_stages: Annotated[int | None, at_least(1), at_most(MOST_PROCESSES), placement] = None
    """Stages of each rank, `stages` apart in the model; null: 2 where the schedule is interleaved, else 1."""
    map: Annotated[Mapping[str, int | str] | Literal["auto"], placement] = "auto"
    """Module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a stage; `auto`: balanced by bytes."""

    max_memory: Annotated[Annotated[float, above(0)] | Mapping[str, float] | None, placement] = None
    """GiB of parameters, gradients, buffers and a shard's activations that a rank takes: for all, or `{0:20,1:40}`."""

    @property
    def ranks_a_replica(self) -> int:
        """The stages that are computed at once."""
        return self.stages

    @property
    def shards_a_replica(self) -> int:
        """Four microbatches a rank: the bubble is then below a fifth of the step (Huang et al. 2019, section 2.3)."""
        return 4 * self.stages

    @property
    def voice(self) -> int:
        """The last rank: it has the last stage, and so the loss."""
        return self.stages - 1

    @property
    def stages_a_rank(self) -> int:
        """Stages of each rank."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.stages * self.stages_a_rank

    def problems(self, facts: PlanContext) -> list[Problem]:
        """Schedules and stages that do not go together, and what concerns every strategy of several processes."""
        found = []
        if several_a_rank(self.schedule) is False and self.stages_a_rank > 1:
            rule = f"schedule={self.schedule} has one stage a rank. Use interleaved, or leave it out."
            found.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if self.schedule == "interleaved" and self.stages_a_rank == 1:
            rule = "interleaves nothing. Use 2 or more, or schedule=1f1b."
            found.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if facts.numerics.reproducible:
            rule = "cannot be had with strategy=pipeline, which sums in an order of its own. Leave it out."
            found.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if facts.objective is not None and not _scores_alone(facts.objective):
            named = type(facts.objective).__name__
            rule = (
                "runs the model itself, and a pipeline has outputs on its last stage only. "
                "Use a Supervised objective without a loss of its own."
            )
            found.append(Problem(key="objective", value=named, rule=rule))
        if self.map == {}:
            rule = "places nothing. Name modules and their stages, {embed:0,rest:1}, or use auto."
            found.append(Problem(key="strategy.map", value="{}", rule=rule))
        found += self._limits.problems()
        return found or super().problems(facts)

    @property
    def _limits(self) -> Limits:
        return Limits(given=self.max_memory, num_ranks=self.stages)

    def problems_with(self, model: nn.Module, facts: PlanContext) -> list[Problem]:
        """What is wrong with the map for this model, and with the model for a pipeline."""
        cut = self._cut(model, facts.precision, facts)
        if not isinstance(cut, StageAssignment):
            return cut
        sparse = sparse_problems(model, "which are not summed")
        return self._exceeded(model, cut, facts) or sparse or self._misfits(model, cut, facts)

    def _misfits(self, model: nn.Module, cut: StageAssignment, facts: PlanContext) -> list[Problem]:
        """What the model does that does not fit its stages, with the map of `auto` where that fits."""
        programs = programs_of(model, facts.sample)
        if isinstance(programs, list):
            return programs
        better = self._cut_by(None, model, facts.precision, facts)
        return misfits(cut, programs) and misfits(
            cut, programs, better=better if isinstance(better, StageAssignment) else None
        )

    def _exceeded(self, model: nn.Module, cut: StageAssignment, facts: PlanContext) -> list[Problem]:
        if self.max_memory is None:
            return []
        precision = Precision(value=facts.precision)  # type: ignore[arg-type]
        kept = activations_in(facts, precision)(model, cut.units)
        return self._limits.exceeded(cut, model_bytes(precision), kept)

    def parts(self, model: nn.Module, facts: PlanContext) -> tuple[StagePart, ...]:
        """The stages of the first replica."""
        cut = self._cut(model, facts.precision, facts)
        if not isinstance(cut, StageAssignment):
            return ()
        bytes_of = model_bytes(Precision(value=facts.precision))  # type: ignore[arg-type]
        devices = [task.device for task in self.tasks(replace(facts, launch=None))]
        return tuple(_part(cut, stage, bytes_of, devices[stage % self.stages]) for stage in range(cut.num_stages))

    def held(self, model: nn.Module, facts: PlanContext) -> Mapping[str, int]:
        """What the fullest rank holds."""
        from trainkit.strategies.pipeline.groups import holders_of  # noqa: PLC0415 - torch.distributed

        cut = self._cut(model, facts.precision, facts)
        if not isinstance(cut, StageAssignment):
            return super().held(model, facts)
        holders = holders_of(model, cut, self.stages)
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        by_place = [
            {name: size for name, size in sizes.items() if place in holders[name]} for place in range(self.stages)
        ]
        return max(by_place, key=lambda held: sum(held.values()))

    def decided(self, build: Callable[[], nn.Module], facts: PlanContext) -> Pipeline:
        """With a stage for each block: what a shard keeps in each, and their order, are known here, not in `spread`."""
        model = build()
        if isinstance(self.map, Mapping) and not names_parts(model, self.map):
            return self
        cut = self._cut(model, facts.precision, facts)
        if not isinstance(cut, StageAssignment):
            raise ConfigError(cut)
        return replace(self, map={unit.name: stage for unit, stage in zip(cut.units, cut.stages, strict=True)})

    def _cut(self, model: nn.Module, value: str, facts: PlanContext | None = None) -> StageAssignment | list[Problem]:
        return self._cut_by(self.map if isinstance(self.map, Mapping) else None, model, value, facts)

    def _cut_by(
        self, given: Mapping[str, int | str] | None, model: nn.Module, value: str, facts: PlanContext | None
    ) -> StageAssignment | list[Problem]:
        precision = Precision(value=value)  # type: ignore[arg-type]
        programs = () if facts is None else programs_of(model, facts.sample)
        return cut_blocks(
            model,
            given,
            num_stages=self.num_stages,
            bytes_of=model_bytes(precision),
            activations=activations_in(facts, precision),
            programs=() if isinstance(programs, list) else programs,
        )

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:  # noqa: ARG002
        """A flat vector for the exchange between replicas."""
        return 0 if num_replicas == 1 else 1

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """None of its own: stages are added up with those alike."""
        return LocalReducer()

    def spread(self, model: nn.Module, identity: Identity, precision: Precision) -> StageParams:
        """What this rank keeps of the model.

        Raises:
            ConfigError: the map does not fit the model.
        """
        from trainkit.strategies.pipeline.groups import holders_of  # noqa: PLC0415 - torch.distributed

        cut = self._cut(model, precision.value)
        if not isinstance(cut, StageAssignment):
            raise ConfigError(cut)
        place = identity.task.rank % self.stages
        names = frozenset(name for name, ranks in holders_of(model, cut, self.stages).items() if place in ranks)
        return StageParams(device=torch.device(identity.task.device), names=names)

    def hold(self, model: nn.Module, precision: Precision, spread: Any) -> PlacedModel:
        """Keep the tensors of this rank's stages, and copies of higher precision of these alone."""
        spread.release(model, lazy_init_values(model))
        held = super().hold(model, precision, spread)
        params = _here(held.params)
        return PlacedModel(
            model=held.model, params=params, masters=params if held.masters is held.params else _here(held.masters)
        )

    def make_replica(self, held: PlacedModel, **rest: Any) -> Replica:
        """The stages of this rank, in groups with the ranks that have the same; collective."""
        from trainkit.strategies.pipeline.assembly import assemble  # noqa: PLC0415 - heavy

        cut = self._cut(held.model, rest["precision"].value)
        assert isinstance(cut, StageAssignment)
        return assemble(held, cut, stages=self.stages, schedule=self.schedule, rest=rest)

    def align(self, replica: Any) -> None:
        """Take over what the first replica begins with, and tied weights from their first stage; collective."""
        here = {name: tensor for name, tensor in replica.model.named_parameters() if not tensor.is_meta}
        here |= {name: tensor for name, tensor in replica.model.named_buffers() if not tensor.is_meta}
        replica.groups.align(here, replica.holders)
        if replica.masters_apart:
            replica.groups.align(replica.masters, replica.holders)

    def work(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> ShardStep:
        """What sends the shards of this replica through the stages."""
        from trainkit.strategies.pipeline.work import PipelineWork  # noqa: PLC0415 - heavy

        return PipelineWork(placed, ticket, batches, training)

    def pieces(self, placed: Any) -> ShardedState:
        """The tensors of this rank's stages; of the first replica, and those of several stages by the first of them."""
        if placed.rank:
            return {}
        found = self._own_state(placed)
        return {key: (TensorShard.whole(tensor),) for key, tensor in found.items() if placed.is_home(name_in(key))}

    def state(self, placed: Any) -> dict[str, Tensor]:
        """Parameters in the masters' dtype, buffers, optimizer slots of all stages; collective."""
        return gather_full(self.pieces(placed), placed.all_ranks)

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take over this rank's tensors of a checkpoint of any strategy."""
        foreign = {name for name, param in placed.model.named_parameters() if param.is_meta and param.requires_grad}
        restore_replica(placed, select(tensors, lambda key: name_in(key) not in foreign))

    def check_replicas(self, placed: Any) -> str | None:
        """The first parameter whose bits are not the same on all ranks that hold it; collective."""
        from trainkit.strategies.pipeline.groups import drifted  # noqa: PLC0415 - torch.distributed

        params = {name: param for name, param in placed.model.named_parameters() if not param.is_meta}
        return drifted(params, placed.holders, placed.all_ranks, num_ranks=self.stages)

    def _own_state(self, placed: Replica) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in replica_state(placed).items() if not tensor.is_meta}


def _scores_alone(objective: Any) -> bool:
    """Whether an objective needs the model's outputs and the targets only: a loss of its own would not be called."""
    return isinstance(objective, Supervised) and type(objective).loss is Supervised.loss


def _here(params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: param for name, param in params.items() if not param.is_meta}


def _part(cut: StageAssignment, stage: int, bytes_of: Any, device: str) -> StagePart:
    units = cut.members(stage)
    own = {id(tensor): tensor for unit in units for _, tensor in unit.tensors()}.values()
    return StagePart(
        stage=stage,
        modules=", ".join(collapsed([unit.name for unit in units])),
        num_params=sum(tensor.numel() for tensor in own if isinstance(tensor, nn.Parameter)),
        num_bytes=sum(bytes_of(tensor) for tensor in own),
        device=device,
    )
