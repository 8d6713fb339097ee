"""What a strategy says of memory, for the plan: optional protocols, as in `capabilities`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.objectives.base import Loss, Model
from trainkit.strategies.base import Batch, PlanContext, Strategy


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """What the fullest device of a strategy holds, in elements."""

    resident: Mapping[str, int]
    """Elements of each parameter, by canonical name."""
    transient: int = 0
    """Elements of parameters and gradients that a device holds temporarily, in addition."""
    gradient_copies: float = 0
    """Copies of all gradients at the peak of a step, in addition to the gradients themselves."""
    bucket: int | None = None
    """Elements of gradients that are alive beside the vector that holds all gradients and outlives the step; None:
    there is no such vector.
    """

    @classmethod
    def whole(cls, model: nn.Module, *, gradient_copies: float = 0, bucket: int | None = None) -> ModelMemory:
        """Return the memory of a device with a whole replica."""
        resident = {name: param.numel() for name, param in model.named_parameters()}
        return cls(resident=resident, gradient_copies=gradient_copies, bucket=bucket)


@runtime_checkable
class EstimatesMemory(Protocol):
    """A strategy whose devices do not hold exactly one replica and its gradients."""

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return what the fullest device holds; pure."""


def estimate_memory(strategy: Strategy, model: nn.Module, context: PlanContext) -> ModelMemory:
    """Return what the fullest device holds, for the plan."""
    if isinstance(strategy, EstimatesMemory):
        return strategy.estimate_memory(model, context)
    return ModelMemory.whole(model)


@dataclass(frozen=True, kw_only=True)
class ReplicaPart:
    """What one device holds and computes of a replica that several devices compute."""

    modules: tuple[str, ...]
    """Names of the modules that it computes."""
    memory: ModelMemory
    """What it holds of the parameters."""
    in_flight: int = 1
    """The most shards whose tensors wait for their backward pass at once."""
    received: int = 0
    """Shards for which it keeps memory to receive the inputs of its modules, and the gradients of their outputs."""


@runtime_checkable
class DividesReplica(Protocol):
    """A strategy under which several devices compute a replica, each some of its modules."""

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:
        """Return the part of each device, where a replica has this many shards of a step; pure."""


def replica_parts(
    strategy: Strategy, model: nn.Module, context: PlanContext, *, num_shards: int
) -> tuple[ReplicaPart, ...]:
    """Return the part of each device of a replica; one part, of no named modules, where a device computes all."""
    found: tuple[ReplicaPart, ...] = ()
    if isinstance(strategy, DividesReplica):
        found = strategy.replica_parts(model, context, num_shards=num_shards)
    return found or (ReplicaPart(modules=(), memory=estimate_memory(strategy, model, context)),)


class RankPass:
    """Forward and backward of one shard on one rank, on a copy of the model without data; used once.

    This one is that of a rank with a whole replica. Subclasses allocate what their ranks allocate, as tensors without
    data, and the plan follows these.
    """

    cuts_operations: ClassVar[bool] = False
    """Whether operations are smaller than those of a whole replica."""
    sums_in_master_dtype: ClassVar[bool] = False
    """Whether gradients of an earlier shard are kept in the masters' dtype, whatever the dtype of the model."""
    received_bytes: int = 0
    """Memory that receives tensors of other ranks for this shard; known after `loss`."""
    once_bytes: int = 0
    """Memory that does not grow with the number of shards in flight; known after `loss`."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model to that of the rank."""

    def keep_gradients(self, model: nn.Module) -> Sequence[Tensor]:
        """Give parameters the gradients of an earlier shard; return the gradients that the plan counts itself."""
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in trained:
            param.grad = torch.empty_like(param)
        return [param.grad for param in trained if param.grad is not None]

    def loss(self, model: nn.Module, batch: Batch, loss: Callable[[Model, Batch], Loss]) -> Loss:
        """Run the forward pass; `loss` is that of the objective for a whole replica."""
        return loss(model, batch)

    def gradients(self, model: nn.Module) -> Sequence[Tensor]:
        """End the backward pass; return the gradients that remain on the rank."""
        return [param.grad for param in model.parameters() if param.grad is not None]


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """A shard of a step, without data or with it."""

    batch: Batch
    """Its collated samples."""
    count: int
    """The shards of the step that a replica computes."""


@runtime_checkable
class RunsRankPasses(Protocol):
    """A strategy whose ranks allocate other tensors in a pass than one device with a whole replica."""

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:
        """Return the pass of each part of a replica, in the order of `replica_parts`; pure.

        Empty where each device computes as if it were alone.

        Args:
            model: without data, or with it; unchanged.
            context: of the plan.
            shard: of a step.
        """


def rank_passes(
    strategy: Strategy, model: nn.Module, context: PlanContext, shard: PlannedShard
) -> tuple[RankPass, ...]:
    """Return the pass of each part of a replica; empty where each device computes as if it were alone."""
    if not isinstance(strategy, RunsRankPasses):
        return ()
    return strategy.rank_passes(model, context, shard)


@runtime_checkable
class ShardsModel(Protocol):
    """A strategy under which each device holds a part of the model; one that ran out of memory is pointed to it."""

    @classmethod
    def sharded_over(cls, count: int) -> Mapping[str, int]:
        """Return the keys of `strategy` that shard the model over so many devices; pure."""
