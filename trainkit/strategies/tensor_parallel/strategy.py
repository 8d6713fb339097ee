"""Tensor parallelism: the layers of a plan are sharded over the ranks of a replica, which compute together."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainkit.cluster.tasks import Identity
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, at_most, placement
from trainkit.numerics.generators import hash64
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import draws_at_random, draws_nothing
from trainkit.objectives.base import Access
from trainkit.strategies.base import Facts, PlanContext, SetupRequest, Strategy
from trainkit.strategies.collectives import broadcast_values
from trainkit.strategies.core.replica import PlacedModel
from trainkit.strategies.core.replica_check import bits_hash
from trainkit.strategies.core.sharded.base import (
    ShardedExecutor,
    ShardedWork,
    cut_and_cast,
    sharding_problems,
    unsharded_model_problems,
    withheld_where_sharded,
    without_order,
)
from trainkit.strategies.core.sharded.fully import (
    Sharding,
    blocks_of_model,
    fully_sharded,
    gathers_anew,
    without_shared,
)
from trainkit.strategies.core.sharded.gathered_pass import GatheredPass, Gathering
from trainkit.strategies.core.sharded.replica import ShardedReplica, ShardSlice, joined_norms, local_part
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import (
    MakeStep,
    build_parts,
    move_and_cast,
    no_reducer,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.mesh import Axes
from trainkit.strategies.groups.process_group import ProcessGroupOptions
from trainkit.strategies.memory import ModelMemory, PlannedShard, RankPass
from trainkit.strategies.model_transforms import is_compiled
from trainkit.strategies.reducers import BackendReducer
from trainkit.strategies.tensor_parallel.cut_pass import CutPass
from trainkit.strategies.tensor_parallel.cutting import (
    ActivationRngRegions,
    Exchange,
    cut_parameters,
    exchange_activations,
)
from trainkit.strategies.tensor_parallel.plans import MatchedPlan, described, match_plan, shares_rng_across_ranks
from trainkit.strategies.tensor_parallel.transfers import CutRanks, activation_transfers, gradient_transfers
from trainkit.strategies.tensors.layouts import Placement, SingleDevicePlacement
from trainkit.strategies.traffic import ModuleCall, StepCut, Transfer, WorkShare, precision_of, ranks_of


@dataclass(frozen=True, kw_only=True)
class OnMesh(SingleDevicePlacement):
    """The device of a rank and its place on the mesh."""

    axes: Axes = field(default_factory=Axes)
    """The axes along which the ranks are arranged."""
    rank: int = 0
    """This rank."""
    mesh: DeviceMesh | None = None
    """The axes of more than one rank; None if there is no other rank."""

    @property
    def places(self) -> dict[str, int]:
        """Axis -> this rank's place on it."""
        return self.axes.coordinates(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ only on one axis; None if this is the only one."""
        return None if self.mesh is None or getattr(self.axes, axis) == 1 else self.mesh.get_group(axis)


def within(outer: ShardSlice, part: Tensor) -> ShardSlice:
    """Return the slice of the full tensor that a part of a part is.

    Args:
        outer: the slice of this rank's part of the layer.
        part: a DTensor, sharded over the replicas, or a plain tensor, which is the whole part.
    """
    inner = ShardSlice.of(part, is_first=outer.is_written)
    offset = tuple(start + more for start, more in zip(outer.offset, inner.offset, strict=True))
    return ShardSlice(offset=offset, size=inner.size, shape=outer.shape, is_written=inner.is_written)


@torch.no_grad()
def begin_alike(replica: ShardedReplica, place: OnMesh, cut: Container[str]) -> None:
    """Broadcast what ranks hold alike from the first one of each axis; collective.

    A model may draw numbers that no seed controls. Along `shard`, `fully_sharded` has done so before it sharded.

    Args:
        replica: the model on its device.
        place: the place of this rank.
        cut: names of the parameters that are cut along `tensor`: its ranks hold other parts of them.
    """
    copies, whole = place.group("replicate"), place.group("tensor")
    rounded = replica.params if replica.masters_apart else {}
    named = [*{**replica.owners, **replica.masters}.items(), *rounded.items(), *replica.model.named_buffers()]
    for name, tensor in named:
        for group in (copies, None if name in cut else whole):
            if group is not None:
                broadcast_values(local_part(tensor), group)


def drifted_part(replica: ShardedReplica) -> str | None:
    """Return the first parameter whose same part has different bits on two ranks; collective."""
    names = list(replica.parts)
    rows = [
        [int(bits_hash(part)), hash64(*replica.cuts[name].offset) >> 1]  # a signed number holds 63 bits
        for name, part in replica.parts.items()
    ]
    found = torch.stack(replica.all_ranks.gather(torch.tensor(rows).unsqueeze(0))).squeeze(1).tolist()
    for at, name in enumerate(names):
        firsts: dict[int, int] = {}
        for rank, row in enumerate(found):
            bits, part = row[at]
            first = firsts.setdefault(part, rank)
            if found[first][at][0] != bits:
                return (
                    f"the parameter {name} differs on rank {rank} from rank {first}, which holds the same part of it."
                )
    return None


@dataclass(frozen=True, kw_only=True)
class TensorParallel(ProcessGroupOptions, Strategy):
    """Train replicas whose layers are each sharded over `degree` ranks.

    Example:
        >>> len(TensorParallel(degree=2, replicas=2).tasks(PlanContext()))
        4
    """

    alone_as_one_device: ClassVar[bool] = True
    facts: ClassVar[Facts] = Facts(
        place=3, compiles="blocks", is_sharded=True, forward_is_collective=True, keeps_memory_format=False
    )

    degree: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES)] = 1
    """Number of ranks over which each layer of the plan is sharded; 1 shards nothing."""
    shard: Annotated[bool, placement] = False
    """Shard the parts of a rank over the replicas as well, and gather them block by block, as in fsdp."""
    plan: Annotated[Mapping[str, str] | Literal["auto"], placement] = "auto"
    """Module names, suffixes of names or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own
    plan.
    """

    @property
    def ranks_a_replica(self) -> int:
        """The number of ranks over which each layer is sharded."""
        return max(self.degree, 1)

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of degrees, and settings that sharded layers do not support."""
        if self.degree < 1:
            return [Problem(key="strategy.degree", value=self.degree, rule="must be 1 or more.")]
        problems = [*super().validate(without_order(context)), *sharding_problems(context)]
        if self.degree == 1 and self.plan != "auto":
            rule = "has no effect with strategy.degree=1, which shards nothing. Use a degree of 2 or more."
            problems.append(Problem(key="strategy.plan", value=_plan_text(self.plan), rule=rule))
        if self.shard and not problems and self.num_replicas(context) == 1:
            rule = "has no effect with 1 replica. Use strategy.replicas=2 or more."
            problems.append(Problem(key="strategy.shard", value=True, rule=rule))
        return problems

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return one replica, with a part of each layer on each device."""
        return {"replicas": 1, "degree": count}

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: ranks hold parts of layers, whose modules compute outside of forward too."""
        is_sharded = self.shard and self.num_replicas(context) > 1
        withheld = withheld_where_sharded("tensor_parallel") if is_sharded or self.degree > 1 else {}
        if not is_sharded:
            withheld.pop(Access.methods, None)
        return replace(super().facts_in(context), withheld=withheld)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - on any host
        """Return problems of the plan for this model, and parameters that cannot be sharded over the replicas."""
        fit = self._fitted(model)
        found = [*(fit.problems or shares_rng_across_ranks(model, fit))]
        return [*found, *(unsharded_model_problems(model) if self.shard else [])]

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - in any
        """Return notes: how layers are sharded, and whether their random numbers differ from those of one device."""
        if self.degree == 1:
            return ("strategy.degree=1 shards no layer: every rank has a whole replica, as in strategy=mirrored.",)
        fit = self._fitted(model)
        if fit.problems or not fit.chosen:
            return ()
        whole = sum(param.numel() for name, param in model.named_parameters() if name not in fit.dims)
        count = sum(param.numel() for param in model.parameters())
        line = (
            f"sharded over {self.degree} ranks: {described(fit)}. "
            f"Each rank has {whole:,} of {count:,} parameters whole."
        )
        if not any(draws_at_random(module) for module in model.modules()):
            return (line,)
        return (line, "the model draws random numbers: for sharded layers, only the distribution is the same.")

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of a rank, and the vector that replicas exchange, unless backward sums in parts."""
        return ModelMemory(
            resident=self._resident_elements(model, context),
            transient=self._transient_elements(model, context),
            gradient_copies=synchronous_gradient_copies(
                context.numerics, 1 if self.shard else self.num_replicas(context)
            ),
        )

    def _resident_elements(self, model: nn.Module, context: PlanContext) -> dict[str, int]:
        """Count the elements of each sharded parameter on a rank; with `shard`, of its rows of all parameters."""
        fit, sharers = self._fitted(model), self.num_replicas(context) if self.shard else 1
        found = {}
        for name, param in model.named_parameters():
            dim, rows = fit.dims.get(name), param.shape[0] if param.dim() else 1
            here = rows // self.degree if dim == 0 else rows
            row = param.numel() // max(rows, 1) // (self.degree if dim else 1)
            found[name] = -(-here // sharers) * row
        return found

    def _transient_elements(self, model: nn.Module, context: PlanContext) -> int:
        """Count, with `shard`, the unsharded tensors, two blocks, the gradients of one, and their send buffers."""
        if not self.shard or self.num_replicas(context) == 1:
            return 0
        fit = self._fitted(model)
        part = {id(p): p.numel() // (self.degree if name in fit.dims else 1) for name, p in model.named_parameters()}
        units = [sum(part[id(param)] for param in block.parameters()) for block in _units(model)]
        largest = max(units, default=0)
        rest = max(sum(part.values()) - sum(units), 0)
        return rest + 2 * largest + 2 * max(largest, rest)

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the exchange of activations within the replicas, and of gradients between them.

        None if the plan does not fit the model, or the model cannot run without data.
        """
        fit, precision = self._fitted(model), precision_of(context)
        calls: Sequence[ModuleCall] | None = ()
        if fit.chosen:
            calls = None if cut.dry_run is None else cut.dry_run.calls([one.name for one in fit.chosen])
        if fit.problems or calls is None:
            return None
        where = CutRanks(
            ranks=ranks_of(self, context),
            degree=self.degree,
            device_type=self.tasks(context)[0].device.partition(":")[0],
            model_width=precision.model_dtype.itemsize,
            master_width=precision.master_dtype.itemsize,
        )
        return (
            *activation_transfers(fit, calls, where, cut, repeats=self.shard),
            *gradient_transfers(model, fit, where, cut, shares=self.shard),
        )

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:  # noqa: ARG002 - any
        """Return the pass of a rank with a part of each layer; none if a rank has whole layers."""
        by_gloo, sharers = self.tasks(context)[0].device == "cpu", self.num_replicas(context)
        gathered = None
        if self.shard and sharers > 1:
            how = Gathering(num_ranks=sharers, precision=precision_of(context), by_gloo=by_gloo)
            gathered = GatheredPass(_units, how)
        if self.degree == 1:
            return () if gathered is None else (gathered,)
        return (CutPass(self._fitted, self.degree, by_gloo=by_gloo, gathered=gathered),)

    def work_share(self, cut: StepCut) -> WorkShare:  # noqa: ARG002 - the same of any number of shards
        """Return the share if all layers are sharded."""
        return WorkShare(size=1 / self.degree)

    def setup(self, request: SetupRequest) -> ShardedExecutor:
        """Join the other ranks, and keep this rank's part of every layer of the plan.

        Raises:
            ConfigError: the plan does not fit the model, or the degrees do not multiply to the number of ranks.
        """
        ranks = self.join(request.identity)
        fit, place, cuts = self._fitted(request.model), self._place(request.identity), dict[str, ShardSlice]()
        copies, sharers = place.group("replicate"), place.group("shard")
        parts = build_parts(
            request,
            ranks=ranks,
            placement=place,
            make_reducer=no_reducer if copies is None else lambda _ranks, _numerics: BackendReducer(group=copies),
            move=partial(self._move, place, cuts),
        )
        if place.mesh is not None:
            parts = replace(parts, join_norms=joined_norms([cuts[name] for name in parts.held.params], parts.device))
        shares = place.axes.shard > 1
        replica = ShardedReplica(parts, cuts=cuts, reload=partial(gathers_anew, parts.held.model) if shares else None)
        begin_alike(replica, place, fit.dims)
        step: MakeStep[ShardedReplica] = ShardStep if sharers is None else partial(ShardedWork, group=sharers)
        return ShardedExecutor(replica, request.training, ranks=ranks, make_step=step, check=drifted_part)

    def _place(self, identity: Identity) -> OnMesh:
        """Return the device of this rank, and its place on the mesh; collective.

        Raises:
            ConfigError: the degrees do not multiply to the number of ranks.
        """
        device = torch.device(identity.task.device)
        if identity.store is None:
            return OnMesh(device=device)
        count = identity.num_ranks // self.degree
        axes = Axes(shard=count, tensor=self.degree) if self.shard else Axes(replicate=count, tensor=self.degree)
        if problems := axes.problems(identity.num_ranks):
            raise ConfigError(problems)
        mesh = axes.mesh(device.type, timeout_s=self.timeout_s)
        return OnMesh(device=device, axes=axes, rank=identity.task.rank, mesh=mesh)

    def _move(
        self,
        place: OnMesh,
        found: dict[str, ShardSlice],
        model: nn.Module,
        precision: Precision,
        placement: Placement,
    ) -> PlacedModel:
        """Keep this rank's part of each layer of the plan, and register the exchange of activations of the layers.

        Raises:
            ConfigError: the plan does not fit the model.
        """
        fit, places, draws = self._fitted(model), place.places, not draws_nothing(model)
        if fit.problems:
            raise ConfigError(list(fit.problems))
        is_first = places["replicate"] == 0
        cuts = cut_parameters(model, fit, place=places["tensor"], degree=self.degree, is_first=is_first)
        move = move_and_cast if place.axes.shard == 1 else partial(cut_and_cast, partial(self._cut, place))
        held = move(model, precision, placement)
        if place.mesh is not None and fit.chosen:
            regions = ActivationRngRegions(
                place=places["tensor"], devices=placement.devices, draws=draws, compiled=is_compiled(model)
            )
            exchange_activations(fit, Exchange(place.mesh["tensor"], regions))
        found.update((name, within(cuts[name], param)) for name, param in held.model.named_parameters())
        return held

    def _cut(self, place: OnMesh, model: nn.Module, precision: Precision, placement: Placement) -> nn.Module:
        """Shard this rank's part of each layer over the replicas; collective."""
        assert place.mesh is not None
        sharding = Sharding(mesh=place.mesh["shard"], device=placement.device, precision=precision)
        return fully_sharded(model, _units(model), sharding)

    def _fitted(self, model: nn.Module) -> MatchedPlan:
        return match_plan(model, self.plan, self.degree) if self.degree > 1 else MatchedPlan()


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered separately."""
    return list(without_shared(model, blocks_of_model(model)).values())


def _plan_text(plan: Mapping[str, str] | str) -> str:
    return plan if isinstance(plan, str) else "{" + ",".join(f"{key}:{style}" for key, style in plan.items()) + "}"
