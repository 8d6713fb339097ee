"""Strategies whose ranks form one mesh: copies of the model, sharded parameters and cut layers, in any combination."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.cluster.tasks import Identity
from trainkit.config.values import MOST_PROCESSES, closest
from trainkit.errors import ConfigError, Problem
from trainkit.fields import Limit, above, at_least, at_most, maths, placement, speed, unit
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import draws_at_random, draws_nothing
from trainkit.objectives.base import Access, Collective
from trainkit.strategies.base import (
    CollectiveCall,
    Facts,
    ModelMemory,
    Numerics,
    PlanContext,
    ReplicaPart,
    Scaled,
    SetupRequest,
    StagePart,
    StepCut,
    Strategy,
    Transfer,
    WorkShare,
    choice_of,
)
from trainkit.strategies.collectives import GroupCollective, RankGroup, broadcast_values
from trainkit.strategies.core.graphs.shards import makers_of
from trainkit.strategies.core.refusals import optimizer_problems
from trainkit.strategies.core.replica import PlacedModel, Replica, joined_norms
from trainkit.strategies.core.step import MakeStep, ShardStep
from trainkit.strategies.core.synchronous import (
    SynchronousExecutor,
    backend_or_lanes,
    build_parts,
    move_and_cast,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.process_group import GroupOfOne, ProcessGroup, ProcessGroupOptions
from trainkit.strategies.mesh.context import CutShardedStep, CutStep, SequenceCut, cut_activations
from trainkit.strategies.mesh.context import model_problems as cut_problems
from trainkit.strategies.mesh.layout import Layout, MeshPlace, TensorPlan, Wrap
from trainkit.strategies.mesh.pipe.stages import ScheduleName, Stages
from trainkit.strategies.mesh.sharding import Axes, fully_sharded, gathers_anew, reduces_when, sharded_units
from trainkit.strategies.mesh.step import (
    LaneSummation,
    Pass,
    ShardedWork,
    unsharded_model_problems,
    withheld_where_sharded,
)
from trainkit.strategies.mesh.tensor import cut_parameters
from trainkit.strategies.mesh.tensor_plan import described
from trainkit.strategies.reducers.options import Reducing, ReductionOptions
from trainkit.strategies.reducers.vector import Compression, LocalReducer, Reducer
from trainkit.strategies.tensor_shards import ShardSlice
from trainkit.strategies.tensors.layouts import Placement, local_part, make_dense
from trainkit.strategies.traffic import Vector, joined, observed_transfers, ranks_a_host, reduction


@torch.no_grad()
def begin_alike(replica: Replica, place: MeshPlace, cut: Container[str]) -> None:
    """Broadcast what ranks hold alike from the first one of each axis; collective.

    A model may draw numbers that no seed controls.

    Args:
        replica: the model on its device.
        place: the place of this rank.
        cut: names of the parameters that are cut along `tensor`: its ranks hold other parts of them.
    """
    along, whole = place.summing("replicate"), place.group("tensor")
    copies = None if along is None else along.get_group()
    rounded = replica.params if replica.masters_apart else {}
    named = [*{**replica.owners, **replica.masters}.items(), *rounded.items(), *replica.model.named_buffers()]
    for name, tensor in named:
        for group in (copies, None if name in cut else whole):
            if group is not None:
                broadcast_values(local_part(tensor), group, place.device)  # offloaded parts are in the host's memory


@dataclass(frozen=True, kw_only=True)
class MeshStrategy(ProcessGroup, Strategy):
    """The common code of `mesh` and of its presets, which differ in their keys alone.

    The order of changes to a model is that of `_move`: layers are cut along `tensor`, then parameters are sharded along
    `shard`, in each of the copies along `replicate`. Forward passes that are recomputed or compiled are in place.
    """

    facts: ClassVar[Facts] = Facts(
        is_sharded=True,
        forward_is_collective=True,
        several_optimizers=True,
        keeps_memory_format=False,
        shows_gradients=True,
    )

    @property
    def reduction(self) -> ReductionOptions:
        """The way in which the copies along `replicate` sum their gradients."""
        return ReductionOptions(reduce="backend")

    @property
    def pipe_stages(self) -> Stages | None:
        """The stages along `pipe`; None: one."""
        return None

    @property
    def keeps_params_whole(self) -> bool:
        """Whether each rank holds whole parameters on any number of ranks."""
        return False

    @property
    def holds_whole(self) -> bool:
        """Whether each rank holds a whole replica on any number of ranks, as under `mirrored`."""
        return self.keeps_params_whole and self.pipe_stages is None and self.ranks_a_replica == 1

    @abstractmethod
    def layout(self, num_ranks: int) -> Layout:
        """Return the layout over a number of ranks; pure."""

    @abstractmethod
    def layout_problems(self, context: PlanContext) -> list[Problem]:
        """Return the problems of the keys, if the ranks fit the devices; pure."""

    def layout_in(self, context: PlanContext) -> Layout:
        """Return the layout over the ranks of a context."""
        return self.layout(self.num_replicas(context) * self.ranks_a_replica)

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: what an objective cannot have where ranks hold parts, and whether fewer ranks will do."""
        layout = self.layout_in(context)
        is_cut = layout.gathers or layout.axes.tensor * layout.axes.context > 1
        if self.pipe_stages is not None:
            reason = "a pipeline has outputs on its last stage only. Use a Supervised objective that keeps the default "
            return Facts(
                compiles="nothing" if layout.axes.context > 1 else "blocks",
                position=self.facts.position,
                supports_meta_init=self.facts.supports_meta_init,
                is_sharded=True,
                forward_is_collective=True,
                keeps_memory_format=not is_cut,
                shards_per_replica=4 * self.pipe_stages.pipe,  # a bubble below a fifth: Huang et al. 2019, section 2.3
                withheld=dict.fromkeys(Access, f"{reason}`loss`."),
            )
        withheld = withheld_where_sharded(choice_of(type(self))) if is_cut else {}
        each = self.ranks_a_replica
        fewer = range(each, layout.axes.num_ranks, each)
        if is_cut and not layout.gathers:  # modules of cut layers compute outside of forward too
            del withheld[Access.methods]
            withheld[Access.derivatives] = (
                "the exchanges between cut layers have no second derivatives. Use strategy=mirrored."
            )
        elastic = all(not self.layout(count).axes.problems(count) for count in fewer)
        facts = replace(super().facts_in(context), withheld=withheld, elastic=elastic, ranks_a_replica=each)
        if self.holds_whole:
            facts = replace(facts, compiles="model", compiles_step=True, keeps_memory_format=True)
        if layout.axes.context > 1:
            alone = "each rank has a part of each sequence, and scores it alone. Use strategy.context=1."
            facts = replace(facts, compiles="nothing", withheld=dict.fromkeys(Access, alone))
        return facts if layout.axes.tensor > 1 else replace(facts, converts=True)

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of the process group, of settings that parts do not support, and of the keys."""
        if self.pipe_stages is not None and (problems := self.pipe_stages.problems(context)):
            return problems
        problems = [*super().validate(context), *([] if self.keeps_params_whole else optimizer_problems(context))]
        return problems or [
            *self.layout_problems(context),
            *self._order_problems(context),
            *self._context_problems(context),
            *self._offload_problems(context),
        ]

    def _order_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems of the reproducible order of summation: layers that are cut, fused optimizers of parts."""
        layout, leave = self.layout_in(context), ", or leave it out."
        if not context.numerics.reproducible:
            return []
        if layout.axes.tensor > 1:
            key = f"strategy.{layout.tensor_key}"
            rule = (
                f"is not kept where {key}={layout.axes.tensor} cuts layers, whose sums are the backend's. Use {key}=1"
            )
            return [Problem(key="numerics.reproducible", value=True, rule=rule + leave)]
        for key, makers in context.optimizer_makers.items() if layout.gathers else ():
            if any(make([nn.Parameter(torch.zeros(1))]).param_groups[0].get("fused") for make in makers):
                rule = "is not kept by a fused optimizer, which rounds the last elements of each part otherwise. Use "
                rule += f"{key.removesuffix('_target_')}fused=false, here and on one device"
                return [Problem(key="numerics.reproducible", value=True, rule=rule + leave)]
        return []

    def _context_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems of sequences that are cut over ranks."""
        degree, objective = self.layout_in(context).axes.context, context.objective
        if degree == 1:
            return []
        if context.numerics.reproducible:
            rule = "is not kept where strategy.context cuts sequences. Use strategy.context=1, or leave it out."
            return [Problem(key="numerics.reproducible", value=True, rule=rule)]
        if objective is None or vars(type(objective)).get("by_position", False):
            return []
        rule = (
            "does not declare by_position, and strategy.context scores parts of each sequence. Use strategy.context=1."
        )
        return [Problem(key="objective", value=type(objective).__name__, rule=rule)]

    def _offload_problems(self, context: PlanContext) -> list[Problem]:
        if not self.layout_in(context).offload or all(task.device != "cpu" for task in self.tasks(context)):
            return []
        rule = "moves parameters of GPUs to the memory of the host, and the replicas are on the CPU. Leave it out."
        return [Problem(key="strategy.offload", value=True, rule=rule)]

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems: layers that cannot be cut, parameters that cannot be sharded, classes that do not exist."""
        layout = self.layout_in(context)
        fit = layout.fitted(model)
        problems = [*fit.problems, *(unsharded_model_problems(model) if layout.gathers else [])]
        if layout.axes.context > 1:
            problems += cut_problems(model, layout.axes.context)
            if layout.axes.tensor > 1 and any(map(draws_at_random, model.modules())):  # other code is watched
                rule = "cuts activations for which random numbers are drawn, and so does strategy.context. "
                rule += "Use one of the two."
                problems.append(Problem(key="strategy.tensor", value=layout.axes.tensor, rule=rule))
        if self.pipe_stages is not None and not problems:
            problems = self.pipe_stages.model_problems(model, layout, context)
        if isinstance(layout.wrap, str):
            return problems
        kinds = sorted({type(module).__name__ for name, module in model.named_modules() if name})
        for name in layout.wrap:
            if name not in kinds:
                close = closest(name, kinds)
                hint = f"Did you mean {close}?" if close else f"It has {', '.join(kinds)}."
                rule = f"no module of the model is of this class. {hint}"
                problems.append(Problem(key="strategy.wrap", value=name, rule=rule))
        return problems

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:
        """Return the note of how layers are cut."""
        layout = self.layout_in(context)
        fit = layout.fitted(model)
        if fit.problems or not fit.chosen:
            return ()
        whole = sum(param.numel() for name, param in model.named_parameters() if name not in fit.dims)
        count = sum(param.numel() for param in model.parameters())
        cut = f"sharded over {layout.axes.tensor} ranks: {described(fit)}."
        return (f"{cut} Each rank has {whole:,} of {count:,} parameters whole.",)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return the stages of the first replica, with the device of the first rank of each."""
        if self.pipe_stages is None:
            return ()
        devices = [task.device for task in self.tasks(replace(context, launch=None))]
        axes = self.layout_in(context).axes
        return self.pipe_stages.described(model, context, devices[:: axes.context * axes.tensor])

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of the rank with the largest use, and the vector that copies exchange, unless backward sums
        in parts.
        """
        parts = self.replica_parts(model, context)
        return max((part.memory for part in parts), key=lambda memory: sum(memory.resident.values()))

    def replica_parts(self, model: nn.Module, context: PlanContext) -> tuple[ReplicaPart, ...]:
        """Return the stages of each rank along `pipe`, or all in one part."""
        memory, stages = self._memory(model, context), self.pipe_stages
        parts = () if stages is None else stages.parts(model, context, memory)
        return parts or (ReplicaPart(modules=(), memory=memory),)

    def _memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of a rank, as if it had all stages."""
        layout, numerics = self.layout_in(context), context.numerics
        along = layout.axes.replicate * (1 if layout.gathers else layout.axes.context)
        copies: float = 0 if layout.gathers else synchronous_gradient_copies(numerics, along)
        kept_copies: float = 0
        if layout.gathers and numerics.reproducible:  # the pieces of all ranks that wait for the next lanes
            rounds = -(-numerics.lanes // layout.axes.num_ranks)
            copies = layout.axes.shard * (rounds - 1).bit_length()
        if self.pipe_stages is not None:
            copies = int(layout.axes.replicate * layout.axes.shard > 1)
        if layout.axes.replicate > 1 and not numerics.reproducible:
            more, kept_copies = self.reduction.exchange_copies(self.reduction.reduce, layout.axes.replicate)
            copies += more
        return ModelMemory(
            resident=layout.resident_elements(model),
            transient=layout.transient_elements(model),
            gradient_copies=copies,
            kept_copies=kept_copies,
        )

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:
        """Return the first rank of each stage."""
        return self.layout_in(context).axes.group_of_first("pipe")

    def observed_shards(self, count: int) -> int:
        """Return as many as are ever in flight on a rank of stages: all of them with gpipe."""
        if self.pipe_stages is None:
            return super().observed_shards(count)
        return count if self.pipe_stages.schedule == "gpipe" else min(count, 2 * self.pipe_stages.pipe)

    def work_share(self, cut: StepCut) -> WorkShare:
        """Return the share of a rank in the operations, if all layers are cut, with the ideal bubble."""
        if self.pipe_stages is None:
            return WorkShare(size=1 / self.ranks_a_replica)
        return WorkShare(operations=self.pipe_stages.operations(cut), size=self.pipe_stages.pipe / self.ranks_a_replica)

    def bubble(self, cut: StepCut) -> float | None:
        """Return the ideal bubble of the schedule; None without stages."""
        return None if self.pipe_stages is None else self.pipe_stages.bubble(cut)

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the transfers that were observed on the first rank of each stage, for all; None if their steps cannot
        run without data.
        """
        layout = self.layout_in(context)
        axes = layout.axes
        calls = None if cut.dry_run is None or layout.fitted(model).problems else cut.dry_run.collectives()
        if calls is None:
            return None
        of_axis = {axis: axes.group_of_first(axis) for axis in ("context", "tensor")}
        of_axis |= {axis: axes.group_of_first(*axes.summed_with(axis)) for axis in ("replicate", "shard")}

        def purpose(observed: int, call: CollectiveCall) -> tuple[str, bool]:
            if call.kind == "send":
                return "activations and their gradients", True
            call = replace(call, ranks=tuple(rank - observed for rank in call.ranks))
            if call.ranks == of_axis["tensor"] and call.shard is not None:
                return "activations and their gradients", False
            if call.ranks == of_axis["context"] and call.kind != "all-reduce":
                return "weights, norms and buffers" if call.shard is None else "keys, values and their gradients", False
            if call.ranks == of_axis["shard"] and call.kind != "all-reduce":
                return "parameters" if call.kind == "all-gather" else "gradients", True
            if call.ranks == of_axis["replicate"] and not call.is_in_update:
                return "gradients", call.shard is not None
            return "weights, norms and buffers", False

        def share(rank: int) -> float:
            return 1.0 if layout.gathers else cut.shards_of(rank // axes.ranks_a_replica) / cut.shards_a_replica

        transfers = observed_transfers(
            calls,
            alike=lambda rank: [peer for peer in range(axes.num_ranks) if axes.stage_of(peer) == axes.stage_of(rank)],
            device_type=self.tasks(context)[0].device.partition(":")[0],
            purpose=purpose,
            share=share,
        )
        if (reducer := self.reduction.reduce) == "backend":
            return transfers
        # the observed copies sum by the backend, and exchange the same vector
        sums = [call for call in calls[0] if call.ranks == of_axis["replicate"] and purpose(0, call)[0] == "gradients"]
        vector = Vector(num_bytes=sum(call.times * call.num_bytes for call in sums), element_bytes=1)
        step = axes.shard * axes.tensor
        on_host = max(ranks_a_host(context, axes.num_ranks) // step, 1)
        groups = [range(start, axes.num_ranks, step) for start in range(step)]
        reductions = [reduction(reducer, group, vector, ranks_a_host=on_host)[0] for group in groups]
        others = (transfer for transfer in transfers if (transfer.what, transfer.how) != ("gradients", "all-reduce"))
        return (*others, replace(reductions[0], flows=joined(*(transfer.flows for transfer in reductions))))

    def sum_of_gradients(self, context: PlanContext) -> str | None:
        """Return the reducer of the copies and the compression, for the summary; lanes leave no choice."""
        copies = self.layout_in(context).axes.replicate
        if copies == 1 or context.numerics.reproducible or self.pipe_stages is not None:
            return None
        return self.reduction.described(context, self.tasks(context))

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Any]:
        """Join the other ranks, and keep this rank's part of the model.

        Raises:
            ConfigError: the plan does not fit the model, or the axes do not multiply to the number of ranks.
        """
        ranks = self.join(request.identity)
        if self.pipe_stages is not None:
            # slow to import, and needed only with stages
            from trainkit.strategies.mesh.pipe.executor import stage_executor  # noqa: PLC0415

            layout = self.layout(request.identity.num_ranks)
            place = self._place(request.identity, layout.axes)
            if layout.gathers:
                _refuse_uneven(request.model, request.training.plan)
            return stage_executor(request, ranks, self.pipe_stages, layout, place, timeout_s=self.timeout_s)
        graphs = None
        if ranks.is_joined:
            replica, _, step = self.build(request, ranks)
        else:
            replica, step = Replica(build_parts(request)), ShardStep
        if self.holds_whole:
            step, graphs = makers_of(request, replica, ShardStep)
        return SynchronousExecutor(replica, request.training, ranks=ranks, make_step=step, graphs=graphs)

    def build(self, request: SetupRequest, ranks: RankGroup) -> tuple[Replica, MeshPlace, MakeStep[Replica]]:
        """Keep this rank's part of the model; return it with its place, and the maker of its steps; collective.

        Args:
            request: the model and the settings of the run.
            ranks: the ranks, which have joined.

        Raises:
            ConfigError: the plan does not fit the model, or the axes do not multiply to the number of ranks.
        """
        layout = self.layout(request.identity.num_ranks)
        fit, place = layout.fitted(request.model), self._place(request.identity, layout.axes)
        cuts, copies = dict[str, ShardSlice](), place.summing("replicate")

        def reducer(collective: Collective, numerics: Numerics) -> Reducer:
            if numerics.reproducible:
                return backend_or_lanes(collective, numerics)
            if copies is None:
                return LocalReducer()
            group = copies.get_group()
            along = GroupCollective(
                rank=copies.get_local_rank(), num_ranks=copies.size(), device=place.device, group=group
            )
            return self.reduction.reducer_of(
                along,
                timeout_s=self.timeout_s,
                on_gpus=place.device.type != "cpu",
                all_ranks=ranks.all_ranks,
                group=group,
            )()

        sequences = SequenceCut.of(place)
        move = partial(_move, layout=layout, place=place, cuts=cuts, sequences=sequences)
        parts = build_parts(request, ranks=ranks, placement=place, make_reducer=reducer, move=move)
        model, gathers, numerics = parts.placed.model, layout.gathers, request.numerics
        counted = {name: cuts[name].is_written for name in parts.placed.params}
        replica = Replica(
            replace(
                parts,
                join_norms=joined_norms(counted, parts.device),
                is_grouped=copies is not None and not gathers,
                cuts=cuts,
                reload=partial(gathers_anew, model) if gathers else parts.reload,
            )
        )
        lanes = None
        if gathers and numerics.reproducible:
            group = place.group("replicate")
            lanes = LaneSummation(lanes=numerics.lanes, num_ranks=layout.axes.num_ranks, copies=group)
            lanes.attach(sharded_units(model), is_alone=layout.axes.shard == 1)

        def expect(current: Pass) -> None:
            if lanes is not None:
                lanes.begin(current)
            if layout.sync == "last":
                reduces_when(model, current.ends_lane)

        begin_alike(replica, place, fit.dims)
        step: MakeStep[Replica] = ShardStep if sequences is None else partial(CutStep, cut=sequences)
        if gathers:
            along_shard = place.summing("shard")
            group = None if along_shard is None else along_shard.get_group()
            kind = ShardedWork if sequences is None else partial(CutShardedStep, cut=sequences)
            step = partial(kind, group=group, has_copies=copies is not None, expect=expect)
        return replica, place, step

    def _place(self, identity: Identity, axes: Axes) -> MeshPlace:
        """Return the device of this rank, and its place on the mesh; collective.

        Raises:
            ConfigError: the axes do not multiply to the number of ranks.
        """
        device = torch.device(identity.task.device)
        if problems := axes.problems(identity.num_ranks):
            raise ConfigError(problems)
        mesh = axes.mesh(device.type, timeout_s=self.timeout_s)
        return MeshPlace(device=device, axes=axes, rank=identity.task.rank, mesh=mesh)


def _move(
    model: nn.Module,
    precision: Precision,
    placement: Placement,
    *,
    layout: Layout,
    place: MeshPlace,
    cuts: dict[str, ShardSlice],
    sequences: SequenceCut | None = None,
) -> PlacedModel:
    """Keep this rank's part of a model; fill `cuts` with the slice of each parameter. Collective.

    Raises:
        ConfigError: the plan does not fit the model.
    """
    fit, tensor_rank, draws = layout.fitted(model), place.coordinates["tensor"], not draws_nothing(model)
    if fit.problems:
        raise ConfigError(list(fit.problems))
    outer = cut_parameters(model, fit, rank=tensor_rank, degree=layout.axes.tensor, is_first=place.is_first_copy)
    if layout.gathers:
        make_dense(model)
        model = fully_sharded(model, layout.units(model), layout.sharding(place, precision))
        parts = {
            name: nn.Parameter(local_part(param.detach()))
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        placed = PlacedModel(model=model, params=parts, masters=parts)
    else:
        placed = move_and_cast(model, precision, placement)
    cut_activations(placed.model, fit, place, sequences, draws=draws)
    for name, param in placed.model.named_parameters():
        cuts[name] = place.within(outer[name], param)
    return placed


AXIS = Limit(rule="must be at least 1, which leaves the axis out.", low=1)
Size = Annotated[int | Literal["auto"], placement, AXIS, at_most(MOST_PROCESSES)]


@dataclass(frozen=True, kw_only=True)
class StagedMesh(MeshStrategy):
    """The keys of stages."""

    schedule: Annotated[ScheduleName, placement] = "1f1b"
    """The order in which a rank computes microbatches; interleaved and zero_bubble may have several stages per rank."""
    virtual_stages: Annotated[int | None, at_least(1), at_most(MOST_PROCESSES), placement, unit("stages")] = None
    """Stages of each rank, as far apart in the model as there are ranks; null: 2 if the schedule is interleaved, else
    1.
    """
    map: Annotated[Mapping[str, int | str] | Literal["auto"], placement] = "auto"
    """Module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a stage; `auto`: balanced by bytes."""

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Self:
        """Return the strategy with a stage for each block."""
        return self if self.pipe_stages is None else replace(self, map=self.pipe_stages.settled(build(), context))


@dataclass(frozen=True, kw_only=True)
class Mesh(StagedMesh):
    """Train on one mesh of ranks: `replicate` copies, each sharded over `shard` groups of `tensor` ranks.

    The ranks along `replicate` and `shard` compute other shards of a step; those along `tensor` compute one shard
    together, and are neighbours. The presets set some of the keys: `fsdp` replicate and shard, `tensor_parallel`
    replicate and tensor.

    Example:
        >>> len(Mesh(replicate=2, shard=2, tensor=2).tasks(PlanContext()))
        8

    Source: Zhao et al. 2023, arXiv:2304.11277 (shard); Shoeybi et al. 2019, arXiv:1909.08053 (tensor).
    """

    facts: ClassVar[Facts] = replace(MeshStrategy.facts, position=4)

    replicate: Annotated[Size, unit("groups")] = 1
    """Copies of the model; gradients are summed over them. auto: as many as the other axes leave."""
    shard: Size = "auto"
    """Ranks over which the parameters of a copy are sharded; auto: as many as the other axes leave."""
    tensor: Annotated[int, placement, AXIS, at_most(MOST_PROCESSES)] = 1
    """Ranks over which each layer of the plan is cut."""
    pipe: Annotated[int, placement, AXIS, at_most(MOST_PROCESSES)] = 1
    """Ranks over which the blocks of a copy are divided into stages."""
    context: Annotated[int, placement, AXIS, at_most(MOST_PROCESSES), unit("tokens")] = 1
    """Ranks over which each sequence is cut; attention gathers keys and values."""
    plan: Annotated[TensorPlan, placement] = "auto"
    """Module names, suffixes of names or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own
    plan.
    """
    wrap: Annotated[Wrap, placement] = "blocks"
    """Unit of the gathers: `blocks` as a map names them, or modules of some classes, `[Block]`."""
    reshard_after_forward: Annotated[bool, speed] = True
    """Whether all blocks but the last reshard after forward; false keeps the whole model unsharded until backward."""
    sync: Annotated[Literal["each", "last"], speed] = "each"
    """Whether gradients are summed after each shard, or only after the last one of a rank."""
    offload: Annotated[bool, placement] = False
    """Whether parts and their optimizer are kept in the memory of the host, and copied to the GPU for gathering."""
    reduce: Annotated[Reducing, placement] = "backend"
    """The reducer that sums gradients over `replicate`."""
    compression: Annotated[Compression, maths(neutral="none")] = "none"
    """Send gradients along `replicate` as bfloat16 or float16: fewer bytes, and a different result."""

    @property
    def keeps_params_whole(self) -> bool:
        """Whether no axis cuts parameters."""
        return self.shard == 1 and self.tensor == 1

    @property
    def reduction(self) -> ReductionOptions:
        """The way in which the copies along `replicate` sum their gradients."""
        return ReductionOptions(reduce=self.reduce, compression=self.compression)

    def as_observed(self) -> Self:
        """Return this mesh with the backend's sum: no other reducer works without the other ranks."""
        return replace(self, reduce="backend")

    @property
    def ranks_a_replica(self) -> int:
        """The ranks that compute a shard of a step together."""
        return self.pipe * self.context * self.tensor

    @property
    def loss_rank(self) -> int:
        """The first rank of the last stage."""
        return (self.pipe - 1) * self.context * self.tensor

    @property
    def pipe_stages(self) -> Stages | None:
        """The stages along `pipe`."""
        if self.pipe == 1:
            return None
        return Stages(pipe=self.pipe, schedule=self.schedule, virtual_stages=self.virtual_stages, map=self.map)

    def _pipe_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems of what stages do not take."""
        axes, problems = self.layout_in(context).axes, list[Problem]()
        if context.optimizers or (context.objective is not None and context.objective.phases):
            rule = "has several optimizers or phases, and stages have one optimizer. Use strategy.pipe=1."
            problems.append(Problem(key="optimizers" if context.optimizers else "objective", rule=rule))
        default = {"sync": "each", "offload": False, "reduce": "backend", "compression": "none"}
        for key, usual in default.items():
            if (value := getattr(self, key)) != usual:
                rule = "does not work with several stages. Leave it out, or use strategy.pipe=1."
                problems.append(Problem(key=f"strategy.{key}", value=value, rule=rule))
        if self.schedule == "zero_bubble" and axes.shard > 1:
            rule = "computes the gradients of weights after those of inputs, when shards have been freed. Use 1f1b or "
            rule += "interleaved, or strategy.shard=1."
            problems.append(Problem(key="strategy.schedule", value=self.schedule, rule=rule))
        return problems

    @property
    def wanted_replicas(self) -> int | Literal["auto"]:
        """The ranks along replicate and shard."""
        return "auto" if self.replicate == "auto" or self.shard == "auto" else self.replicate * self.shard

    def replicas_problem(self, rule: str, value: object = None) -> Problem:
        """Return a problem of the number of ranks, which several keys set."""
        keys = ("replicate", "shard", "pipe", "context", "tensor")
        sizes = ", ".join(f"{key}={getattr(self, key)}" for key in keys)
        return Problem(key="strategy", value=f"mesh ({sizes})", rule=rule if value is None else f"{value}: {rule}")

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout; what `auto` leaves open is filled: `shard` first, then `replicate`."""
        replicas = max(num_ranks // self.ranks_a_replica, 1)
        replicate: int = self.replicate if self.replicate != "auto" else 1
        if self.replicate == "auto" and self.shard != "auto":
            replicate = max(replicas // self.shard, 1)
        shard: int = self.shard if self.shard != "auto" else max(replicas // replicate, 1)
        return Layout(
            axes=Axes(replicate=replicate, shard=shard, pipe=self.pipe, context=self.context, tensor=self.tensor),
            plan=self.plan,
            wrap=self.wrap,
            reshard_after_forward=self.reshard_after_forward,
            sync=self.sync,
            offload=self.offload,
        )

    def layout_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems: axes that do not make up the ranks, and keys without effect on an axis of one rank."""
        ranks = self.num_replicas(context) * self.ranks_a_replica
        axes = self.layout(ranks).axes
        if problems := axes.problems(ranks) or (self._pipe_problems(context) if axes.pipe > 1 else []):
            return problems
        idle = {"wrap": self.wrap != "blocks", "reshard_after_forward": not self.reshard_after_forward}
        idle |= {"sync": self.sync != "each", "offload": self.offload}
        problems = [_idle(key, getattr(self, key), "shard") for key, used in idle.items() if used and axes.shard == 1]
        idle = {"schedule": self.schedule != "1f1b", "virtual_stages": self.virtual_stages is not None}
        idle |= {"map": self.map != "auto"}
        problems += [_idle(key, getattr(self, key), "pipe") for key, used in idle.items() if used and axes.pipe == 1]
        problems += [_idle("plan", plan_text(self.plan), "tensor")] if axes.tensor == 1 and self.plan != "auto" else []
        idle = {"reduce": self.reduce != "backend", "compression": self.compression != "none"}
        if axes.replicate == 1:
            problems += [_idle(key, getattr(self, key), "replicate") for key, used in idle.items() if used]
        elif self.compression == "powersgd":
            rule = "is of whole matrices, of which ranks of a mesh exchange parts. Use bf16 or fp16, or mirrored."
            problems.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        else:
            problems += self.reduction.reduction_problems(context, lambda: self.tasks(context))
        return [*problems, *wrap_problems(self.wrap)]

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:
        """Return the sizes of the axes, and how layers are cut."""
        axes = self.layout_in(context).axes
        pipe = "".join(f" x {size} ({axis})" for axis in ("pipe", "context") if (size := getattr(axes, axis)) > 1)
        sizes = f"{axes.replicate} (replicate) x {axes.shard} (shard){pipe} x {axes.tensor} (tensor)"
        return (f"mesh: {sizes} ranks.", *super().notes(model, context))


def _refuse_uneven(model: nn.Module, plan: BatchPlan) -> None:
    """Refuse microbatches of several sizes, which are filled up, for a model that couples their samples.

    Raises:
        ConfigError: there are some.
    """
    steps = {plan.steps_per_epoch - 1, 0}
    sizes = {plan.shard_size(step, shard) for step in steps for shard in range(plan.num_shards(step))}
    coupled = (name for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    if len(sizes) > 1 and (name := next(coupled, None)) is not None:
        rule = f"gives microbatches of {min(sizes)} and {max(sizes)} samples, which {name} couples, and ranks along "
        rule += "shard fill up shorter ones. Use a size that divides every batch, and batch.drop_last=true."
        raise ConfigError([Problem(key="batch.micro_size", value=plan.micro_size, rule=rule)])


def wrap_problems(wrap: Wrap) -> list[Problem]:
    """Return the problem of an empty list of classes."""
    if wrap:
        return []
    return [Problem(key="strategy.wrap", value=[], rule="names no class. Name some, [Block], or use blocks.")]


def _idle(key: str, value: object, axis: str) -> Problem:
    rule = f"has no effect with one rank along {axis}. Use strategy.{axis}=2 or more, or leave it out."
    return Problem(key=f"strategy.{key}", value=value, rule=rule)


def plan_text(plan: TensorPlan) -> str:
    """Return a plan as a config writes it."""
    return plan if isinstance(plan, str) else "{" + ",".join(f"{key}:{style}" for key, style in plan.items()) + "}"


@dataclass(frozen=True, kw_only=True)
class Fsdp(GroupOfOne, ProcessGroupOptions, MeshStrategy):
    """Train a model that does not fit on one device: parameters, gradients and optimizer state are sharded over the
    ranks.

    Each rank computes its own shards of the batch, as in `mirrored`. The parameters of a block are gathered before it
    computes and resharded after; its gradients are reduce-scattered (FSDP2).

    Example:
        >>> [task.device for task in Fsdp(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stage 3); Zhao et al. 2023, arXiv:2304.11277.
    """

    alone_as_one_device: ClassVar[bool] = True
    facts: ClassVar[Facts] = replace(MeshStrategy.facts, position=2, supports_meta_init=True, converts=True)

    replicate: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement, unit("groups")] = 1
    """Groups of ranks, each with a whole model sharded over its ranks; above 1 (hybrid) gradients are summed over
    groups.
    """
    wrap: Annotated[Wrap, placement] = "blocks"
    """Unit of the gathers: `blocks` as a map names them, or modules of some classes, `[Block]`."""
    reshard_after_forward: Annotated[bool, speed] = True
    """Whether all blocks but the last reshard after forward; false keeps the whole model unsharded until backward."""
    sync: Annotated[Literal["each", "last"], speed] = "each"
    """Whether gradients are summed after each shard, or only after the last one of a rank, with unsharded gradients
    until then.
    """
    offload: Annotated[bool, placement] = False
    """Whether parts and their optimizer are kept in the memory of the host, and copied to the GPU for gathering."""

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout: groups of ranks, each with a whole model."""
        return Layout(
            axes=Axes(replicate=self.replicate, shard=max(num_ranks // self.replicate, 1)),
            wrap=self.wrap,
            reshard_after_forward=self.reshard_after_forward,
            sync=self.sync,
            offload=self.offload,
            gathers_alone=self.is_grouped,
        )

    def layout_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems: uneven groups, groups of one rank, and an empty list of classes."""
        count, groups = self.num_replicas(context), self.replicate
        if count % groups:
            rule = f"must divide the {count} replicas."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        if groups > 1 and count == groups:
            rule = f"leaves each of the {count} replicas a whole model. Use at most {count // 2}, or strategy=mirrored."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        return wrap_problems(self.wrap)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of sharded parameters even for one rank: a run may continue on more."""
        problems = super().validate_model(model, context)
        return problems if self.layout_in(context).gathers else [*unsharded_model_problems(model), *problems]

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return the number of replicas, each on a device."""
        return cls.sharded_over(count)

    @classmethod
    def sharded_over(cls, count: int) -> dict[str, int]:
        """Return the override for `count` replicas that each hold a part of the model."""
        return {"replicas": count}

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:  # noqa: ARG002 - the same on any device
        """Return the key for `replicas` ranks."""
        return Scaled(keys={"replicas": replicas})


@dataclass(frozen=True, kw_only=True)
class Pipeline(ProcessGroupOptions, StagedMesh):
    """Train each stage of a replica on its own rank, with the shards of a step as microbatches.

    Example:
        >>> strategy, context = Pipeline(stages=4, replicas=2), PlanContext()
        >>> strategy.num_replicas(context), len(strategy.tasks(context))
        (2, 8)
    """

    facts: ClassVar[Facts] = Facts(position=4, supports_meta_init=True, is_sharded=True, forward_is_collective=True)

    replicas: Annotated[int | Literal["auto"], placement, at_most(MOST_PROCESSES), unit("replicas")] = 1
    """Copies of the whole pipeline, over all hosts; auto: those that the GPUs of this host or a launch make up."""
    stages: Annotated[int, at_least(2), at_most(MOST_PROCESSES), placement, unit("ranks")] = 2
    """Number of ranks of a replica."""

    max_memory: Annotated[Annotated[float, above(0)] | Mapping[str, float] | None, placement, unit("GiB")] = None
    """GiB of parameters, gradients, buffers and a shard's activations that a rank takes: for all, or `{0:20,1:40}`."""

    @property
    def pipe_stages(self) -> Stages:
        """The stages of each replica."""
        return Stages(
            pipe=self.stages,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            map=self.map,
            max_memory=self.max_memory,
            key="strategy.stages",
        )

    @property
    def ranks_a_replica(self) -> int:
        """The ranks of the stages."""
        return self.stages

    @property
    def loss_rank(self) -> int:
        """The last rank: it has the last stage, and so the loss."""
        return self.stages - 1

    @property
    def keeps_params_whole(self) -> bool:
        """True: a stage is whole."""
        return True

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout: copies of a model in stages."""
        return Layout(axes=Axes(replicate=max(num_ranks // self.stages, 1), pipe=self.stages))

    def layout_problems(self, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - in any
        """Return none: any replicas have stages."""
        return []

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return one replica, with a stage on each device."""
        return {"replicas": 1, **cls.sharded_over(count)}

    @classmethod
    def sharded_over(cls, count: int) -> dict[str, int]:
        """Return the number of stages, each on a device."""
        return {"stages": count}


@dataclass(frozen=True, kw_only=True)
class TensorParallel(ProcessGroupOptions, MeshStrategy):
    """Train replicas whose layers are each sharded over `degree` ranks.

    Example:
        >>> len(TensorParallel(degree=2, replicas=2).tasks(PlanContext()))
        4
    """

    alone_as_one_device: ClassVar[bool] = True
    facts: ClassVar[Facts] = replace(MeshStrategy.facts, position=3)

    degree: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES), unit("ranks")] = 1
    """Number of ranks over which each layer of the plan is sharded; 1 shards nothing."""
    plan: Annotated[TensorPlan, placement] = "auto"
    """Module names, suffixes of names or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own
    plan.
    """

    @property
    def ranks_a_replica(self) -> int:
        """The number of ranks over which each layer is sharded."""
        return max(self.degree, 1)

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout: copies of a model whose layers are cut."""
        axes = Axes(replicate=max(num_ranks // self.ranks_a_replica, 1), tensor=self.ranks_a_replica)
        return Layout(axes=axes, plan=self.plan, tensor_key="degree")

    def layout_problems(self, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - in any
        """Return problems: a degree that is none, and a plan that has no effect."""
        if self.degree < 1:
            return [Problem(key="strategy.degree", value=self.degree, rule="must be 1 or more.")]
        if self.degree > 1 or self.plan == "auto":
            return []
        rule = "has no effect with strategy.degree=1, which shards nothing. Use a degree of 2 or more."
        return [Problem(key="strategy.plan", value=plan_text(self.plan), rule=rule)]

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return one replica, with a part of each layer on each device."""
        return {"replicas": 1, "degree": count}

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:
        """Return the note of how layers are sharded."""
        if self.degree == 1:
            return ("strategy.degree=1 shards no layer: every rank has a whole replica, as in strategy=mirrored.",)
        return super().notes(model, context)
