"""Fully sharded data parallelism: every rank holds a part of each parameter, and gathers it to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from trainkit.config.values import MOST_PROCESSES, closest
from trainkit.errors import Problem
from trainkit.fields import at_least, at_most, placement, speed
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import Facts, PlanContext, SetupRequest, Strategy
from trainkit.strategies.core.sharded.base import (
    ShardedExecutor,
    cut_and_cast,
    cuts_of,
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
    modules_of_classes,
    reduces_when,
    without_shared,
)
from trainkit.strategies.core.sharded.gathered_pass import GatheredPass, Gathering
from trainkit.strategies.core.sharded.replica import ShardedReplica, joined_norms
from trainkit.strategies.core.synchronous import build_parts, no_reducer
from trainkit.strategies.groups.mesh import Axes
from trainkit.strategies.groups.process_group import GroupOfOne, ProcessGroupOptions
from trainkit.strategies.memory import ModelMemory, PlannedShard, RankPass
from trainkit.strategies.scaling import Scaled
from trainkit.strategies.tensors.layouts import Placement
from trainkit.strategies.traffic import StepCut, Transfer, precision_of, ranks_of
from trainkit.strategies.traffic.sharded import Gathers, sharded_traffic


@dataclass(frozen=True, kw_only=True)
class Fsdp(GroupOfOne, ProcessGroupOptions, Strategy):
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
    facts: ClassVar[Facts] = Facts(
        place=2,
        supports_meta_init=True,
        is_sharded=True,
        forward_is_collective=True,
        several_optimizers=True,
        keeps_memory_format=False,
        converts=True,
        shows_gradients=True,
    )

    replicate: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement] = 1
    """Groups of ranks, each with a whole model sharded over its ranks; above 1 (hybrid) gradients are summed over
    groups.
    """
    wrap: Annotated[Literal["blocks"] | tuple[str, ...], placement] = "blocks"
    """Unit of the gathers: `blocks` as a map names them, or modules of some classes, `[Block]`."""
    reshard_after_forward: Annotated[bool, speed] = True
    """Whether all blocks but the last reshard after forward; false keeps the whole model unsharded until backward."""
    sync: Annotated[Literal["each", "last"], speed] = "each"
    """Whether gradients are summed after each shard, or only after the last one of a rank, with unsharded gradients
    until then.
    """
    offload: Annotated[bool, placement] = False
    """Whether parts and their optimizer are kept in the memory of the host, and copied to the GPU for gathering."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every strategy that shards parameters; uneven groups, keys without effect."""
        found = [*super().validate(without_order(context)), *sharding_problems(context)]
        if found:
            return found
        return [*self._group_problems(context), *self._own_problems(context)]

    def _group_problems(self, context: PlanContext) -> list[Problem]:
        count, groups = self.num_replicas(context), self.replicate
        if count % groups:
            rule = f"must divide the {count} replicas."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        if groups > 1 and count == groups:
            rule = f"leaves each of the {count} replicas a whole model. Use at most {count // 2}, or strategy=mirrored."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        return []

    def _own_problems(self, context: PlanContext) -> list[Problem]:
        found = []
        if self.wrap == ():
            rule = "names no class. Name some, [Block], or use blocks."
            found.append(Problem(key="strategy.wrap", value=[], rule=rule))
        if self.offload and any(task.device == "cpu" for task in self.tasks(context)):
            rule = "moves parameters of GPUs to the memory of the host, and the replicas are on the CPU. Leave "
            found.append(Problem(key="strategy.offload", value=True, rule=f"{rule}it out."))
        return found

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: ranks hold parts, and have whole parameters in the model's forward pass alone."""
        is_sharded = self.num_replicas(context) > 1 or self.is_grouped
        return replace(super().facts_in(context), withheld=withheld_where_sharded("fsdp") if is_sharded else {})

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - on any host
        """Return problems: parameters that cannot be sharded, and classes that the model does not have."""
        found = unsharded_model_problems(model)
        if isinstance(self.wrap, str):
            return found
        known = sorted({type(module).__name__ for name, module in model.named_modules() if name})
        for name in self.wrap:
            if name not in known:
                close = closest(name, known)
                hint = f"Did you mean {close}?" if close else f"It has {', '.join(known)}."
                rule = f"no module of the model is of this class. {hint}"
                found.append(Problem(key="strategy.wrap", value=name, rule=rule))
        return found

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return the number of replicas, each on a device."""
        return cls.sharded_over(count)

    @classmethod
    def sharded_over(cls, count: int) -> dict[str, int]:
        """Return the override for `count` replicas that each hold a part of the model."""
        return {"replicas": count}

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the first rank's part of each parameter, which is the largest, and temporarily gathered ones."""
        ranks = self.num_replicas(context) // self.replicate
        resident = {
            name: -(-param.shape[0] // ranks) * (param.numel() // max(param.shape[0], 1)) if param.dim() else 1
            for name, param in model.named_parameters()
        }
        return ModelMemory(resident=resident, transient=self._transient_elements(model, context))

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:  # noqa: ARG002 - any
        """Return the pass of a rank with a part of each parameter; none where the only rank has all."""
        ranks = self.num_replicas(context) // self.replicate
        if ranks == 1:
            return ()
        how = Gathering(
            num_ranks=ranks,
            precision=precision_of(context),
            by_gloo=self.tasks(context)[0].device == "cpu",
            reshard_after_forward=self.reshard_after_forward,
            sums_each=self.sync == "each",
        )
        return (GatheredPass(self._units, how),)

    def _transient_elements(self, model: nn.Module, context: PlanContext) -> int:
        """Count the model's own tensors, two gathered modules, the gradients of one, and their send buffers.

        Without `reshard_after_forward` all parameters, with `sync=last` all gradients.
        """
        if self.num_replicas(context) == 1 and not self.is_grouped:
            return 0
        units = [sum(param.numel() for param in unit.parameters()) for unit in self._units(model)]
        whole, largest = sum(param.numel() for param in model.parameters()), max(units, default=0)
        rest = max(whole - sum(units), 0)
        params = rest + 2 * largest if self.reshard_after_forward else whole
        return params + 2 * max(largest, rest) + (whole if self.sync == "last" else 0)

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...]:
        """Return the gathers of the parameters and the sums of the gradients of each shard."""
        ranks, precision = ranks_of(self, context), precision_of(context)
        return sharded_traffic(
            model,
            self._units(model),
            ranks,
            Gathers(
                groups=self.replicate,
                device_type=self.tasks(context)[0].device.partition(":")[0],
                gathered_bytes=precision.model_dtype.itemsize,
                summed_bytes=precision.master_dtype.itemsize,
                gathers=cut.shards_a_replica,
                again=self.reshard_after_forward,
                sums=cut.shards_a_replica if self.sync == "each" else 1,
            ),
        )

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:  # noqa: ARG002 - the same on any device
        """Return the key for `replicas` ranks."""
        return Scaled(keys={"replicas": replicas})

    def setup(self, request: SetupRequest) -> ShardedExecutor:
        """Join the other ranks, and shard the model over them."""
        ranks = self.join(request.identity)
        parts = build_parts(request, ranks=ranks, make_reducer=no_reducer, move=partial(cut_and_cast, self._cut))
        held = parts.held
        cuts = cuts_of(held.model, is_rank0=ranks.all_ranks.rank == 0)
        if not cuts:
            return ShardedExecutor(ShardedReplica(parts, cuts={}), request.training, ranks=ranks)
        replica = ShardedReplica(
            replace(parts, join_norms=joined_norms([cuts[name] for name in held.params], parts.device)),
            cuts=cuts,
            expect=partial(reduces_when, held.model) if self.sync == "last" else None,
            reload=partial(gathers_anew, held.model),
        )
        return ShardedExecutor(replica, request.training, ranks=ranks)

    def _cut(self, model: nn.Module, precision: Precision, spread: Placement) -> nn.Module:
        """Shard every parameter over the ranks of a group; collective."""
        axes = Axes(replicate=self.replicate, shard=torch.distributed.get_world_size() // self.replicate)
        sharding = Sharding(
            mesh=axes.mesh(spread.device.type, timeout_s=self.timeout_s),
            device=spread.device,
            precision=precision,
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
        )
        return fully_sharded(model, self._units(model), sharding)

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are gathered separately, inner ones first."""
        found = blocks_of_model(model) if self.wrap == "blocks" else modules_of_classes(model, self.wrap)
        chosen = without_shared(model, found)
        return [chosen[name] for name in sorted(chosen, key=lambda name: -name.count("."))]
