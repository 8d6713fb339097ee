"""The base of strategies whose ranks hold parts of the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import Problem
from trainkit.numerics.batch import Ticket
from trainkit.numerics.deferred import lazy_init_values
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics, PlanContext, StepContext
from trainkit.strategies.core.placement import Placement
from trainkit.strategies.core.replica import PlacedModel, Replica
from trainkit.strategies.core.sparse import sparse_problems
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.fsdp.sharded.elementwise import optimizer_problems
from trainkit.strategies.fsdp.sharded.meta_init import filled
from trainkit.strategies.fsdp.sharded.norms import joined_norms
from trainkit.strategies.fsdp.sharded.replica import ShardedReplica, restore_pieces, sharded_pieces
from trainkit.strategies.fsdp.sharded.shard_geometry import ShardSlice, local_part
from trainkit.strategies.fsdp.sharded.work import ShardedWork
from trainkit.strategies.groups.process_group import ProcessGroupStrategy
from trainkit.strategies.reducers import LocalReducer, Reducer
from trainkit.strategies.tensors.layouts import make_dense
from trainkit.strategies.tensors.sharded import ShardedState, gather_full

__all__ = ["Sharded"]


@dataclass(frozen=True, kw_only=True)
class Sharded(ProcessGroupStrategy):
    """Every rank holds parts of the parameters, of their gradients and of the optimizer's state.

    A subclass says how a model is cut (`cut`). A single rank has nothing to cut, and trains as one device does.
    """

    holds_pieces: ClassVar[bool] = True
    computes_together: ClassVar[bool] = True

    @abstractmethod
    def cut(self, model: nn.Module, precision: Precision, spread: Placement) -> nn.Module:
        """Cut the model over the ranks, its parameters made DTensors in the numbers they are held in; collective."""

    def problems(self, facts: PlanContext) -> list[Problem]:
        """What concerns every strategy of several processes; an order of summation or an optimizer not to be had."""
        single = replace(facts, numerics=replace(facts.numerics, reproducible=False))
        found = super().problems(single)
        if facts.numerics.reproducible:
            rule = "is not kept where gradients are summed part by part. Use strategy=mirrored, or leave it out."
            found.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        return [*found, *optimizer_problems(facts)]

    def problems_with(self, model: nn.Module, facts: PlanContext) -> list[Problem]:
        """Parameters that cannot be cut, and gradients that cannot be summed in parts."""
        found = [*super().problems_with(model, facts), *sparse_problems(model, "which are not summed in parts")]
        for name, param in model.named_parameters():
            if not param.dim():
                rule = f"{name} has no dims, and cannot be cut. Give it the shape (1,)."
                found.append(Problem(key="model", rule=rule))
        return found

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """None is asked: backward sums gradients over the ranks as it makes them."""
        return LocalReducer()

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:  # noqa: ARG002
        """None beside the parts."""
        return 0

    def hold(self, model: nn.Module, precision: Precision, spread: Placement) -> PlacedModel:
        """Cut the model, and look at this rank's parts as plain tensors."""
        if not dist.is_initialized():
            values = lazy_init_values(model)
            return super().hold(model if values is None else filled(model, values), precision, spread)
        make_dense(model)
        model = self.cut(model, precision, spread)
        parts = {
            name: nn.Parameter(local_part(param.detach()))
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        return PlacedModel(model=model, params=parts, masters=parts)

    def make_replica(self, held: PlacedModel, **rest: Any) -> ShardedReplica:
        """The parts, and where they lie."""
        owners = dict(held.model.named_parameters())
        replica = ShardedReplica(model=held.model, params=held.params, masters=held.masters, owners=owners, **rest)
        if any(isinstance(param, DTensor) for param in owners.values()):
            cuts = {
                name: ShardSlice.of(param, is_first=self.is_first(replica, param)) for name, param in owners.items()
            }
            replica.cuts = cuts
            replica.join_norms = joined_norms([cuts[name] for name in held.params], replica.device)
        return replica

    def is_first(self, placed: Replica, param: Tensor) -> bool:
        """Whether this is the first rank that holds a parameter's part, of those outside of its mesh."""
        return placed.is_rank0 or isinstance(param, DTensor)

    def work(self, placed: Replica, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> ShardStep:
        """What computes a ticket, together with the other ranks."""
        if isinstance(placed, ShardedReplica) and placed.cuts:
            return ShardedWork(placed, ticket, batches, training)
        return super().work(placed, ticket, batches, training)

    def pieces(self, placed: ShardedReplica) -> ShardedState:
        """The parts of this rank; what is whole everywhere, by the owner."""
        return sharded_pieces(placed) if placed.cuts else super().pieces(placed)

    def state(self, placed: Replica) -> dict[str, Tensor]:
        """The whole state, put together on every rank; collective."""
        if isinstance(placed, ShardedReplica) and placed.cuts:
            return gather_full(sharded_pieces(placed), placed.all_ranks)
        return super().state(placed)

    def load_state(self, placed: Replica, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of the tensors of a checkpoint of any strategy."""
        if isinstance(placed, ShardedReplica) and placed.cuts:
            restore_pieces(placed, tensors)
        else:
            super().load_state(placed, tensors)
