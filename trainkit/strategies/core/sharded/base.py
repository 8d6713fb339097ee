"""Common code of strategies whose ranks hold parts of the parameters, their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainkit.errors import Problem
from trainkit.numerics.deferred import lazy_init_values
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access
from trainkit.strategies.base import PlanContext, StateDict, StepContext
from trainkit.strategies.core.refusals import optimizer_problems
from trainkit.strategies.core.replica import PlacedModel, Placement, replica_state, restore_replica
from trainkit.strategies.core.sharded.fully import filled
from trainkit.strategies.core.sharded.replica import (
    ShardedReplica,
    ShardSlice,
    local_part,
    restore_pieces,
    sharded_pieces,
)
from trainkit.strategies.core.sharded.work import ShardedWork
from trainkit.strategies.core.sparse import sparse_problems
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import MakeStep, SynchronousExecutor, move_and_cast
from trainkit.strategies.groups.process_group import RankGroup
from trainkit.strategies.tensors.layouts import make_dense
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard, gather_full

CutModel = Callable[[nn.Module, Precision, Placement], nn.Module]
"""Shards a model over the ranks: its parameters become DTensors in their stored dtype; collective."""


def without_order(context: PlanContext) -> PlanContext:
    """Return a context without the order of summation, which `sharding_problems` checks."""
    return replace(context, numerics=replace(context.numerics, reproducible=False))


def sharding_problems(context: PlanContext) -> list[Problem]:
    """Return the problem of an order of summation or an optimizer that sharded parameters do not support."""
    found = []
    if context.numerics.reproducible:
        rule = "is not kept where gradients are summed part by part. Use strategy=mirrored, or leave it out."
        found.append(Problem(key="numerics.reproducible", value=True, rule=rule))
    return [*found, *optimizer_problems(context)]


def unsharded_model_problems(model: nn.Module) -> list[Problem]:
    """Return problems of parameters that cannot be sharded, and gradients that cannot be summed in parts."""
    found = sparse_problems(model, "which are not summed in parts")
    for name, param in model.named_parameters():
        if not param.dim():
            rule = f"{name} has no dims, and cannot be cut. Give it the shape (1,)."
            found.append(Problem(key="model", rule=rule))
    return found


def withheld_where_sharded(name: str) -> dict[Access, str]:
    """Return what an objective cannot have of a model whose parameters are whole in its forward pass alone.

    Args:
        name: the strategy, for messages.
    """
    choose = "Use strategy=mirrored, where each replica is whole"
    return {
        Access.methods: f"{name} gathers parameters for forward only. {choose}, or let forward call them.",
        Access.parameters: f"each rank of {name} holds a part of them. {choose}.",
        Access.derivatives: f"{name} lets go of gathered parameters after the first backward pass. {choose}.",
    }


def cut_and_cast(cut: CutModel, model: nn.Module, precision: Precision, placement: Placement) -> PlacedModel:
    """Shard a model, and return this rank's parts as plain tensors; a single rank keeps the whole model."""
    if not dist.is_initialized():
        values = lazy_init_values(model)
        return move_and_cast(model if values is None else filled(model, values), precision, placement)
    make_dense(model)
    model = cut(model, precision, placement)
    parts = {
        name: nn.Parameter(local_part(param.detach()))
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    return PlacedModel(model=model, params=parts, masters=parts)


def cuts_of(model: nn.Module, *, is_rank0: bool) -> dict[str, ShardSlice]:
    """Return the slice of each parameter on this rank; empty if none is sharded."""
    params = dict(model.named_parameters())
    if not any(isinstance(param, DTensor) for param in params.values()):
        return {}
    return {
        name: ShardSlice.of(param, is_first=is_rank0 or isinstance(param, DTensor)) for name, param in params.items()
    }


class ShardedExecutor(SynchronousExecutor[ShardedReplica]):
    """A rank with parts of the parameters, or whole ones if the replica has no cuts."""

    def __init__(
        self,
        replica: ShardedReplica,
        training: StepContext,
        *,
        ranks: RankGroup,
        make_step: MakeStep[ShardedReplica] | None = None,
        check: Callable[[ShardedReplica], str | None] = lambda _: None,
    ) -> None:
        step: MakeStep[ShardedReplica] = ShardedWork if replica.cuts else ShardStep
        super().__init__(replica, training, ranks=ranks, make_step=make_step or step)
        self._check = check

    def sharded_state_dict(self) -> ShardedState:
        """Return the shards of this rank; tensors that are whole on all ranks, on rank 0."""
        replica = self._replica
        if replica.cuts:
            return sharded_pieces(replica)
        if not replica.is_rank0:
            return {}
        return {name: (TensorShard.whole(tensor),) for name, tensor in replica_state(replica).items()}

    def state_dict(self) -> StateDict:
        """Return the whole state, gathered on every rank; collective."""
        if self._replica.cuts:
            return gather_full(sharded_pieces(self._replica), self._replica.all_ranks)
        return replica_state(self._replica)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's parts of the tensors of a checkpoint of any strategy."""
        if self._replica.cuts:
            restore_pieces(self._replica, state)
        else:
            restore_replica(self._replica, state)

    def recover(self, step: int) -> bool:
        """Return False: other ranks hold parts, and may have begun an update."""
        del step
        return False

    def check_replicas(self) -> str | None:
        """Return a parameter of which two ranks hold the same part in different bits; collective."""
        return self._check(self._replica)
