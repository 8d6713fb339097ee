"""Optional protocols by which strategies describe their devices and memory for the plan, as in `capabilities`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.objectives.base import Loss, Model
from trainkit.strategies.base import Batch, PlanContext, StagePart, Strategy


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The elements on the device of a strategy with the largest memory use."""

    resident: Mapping[str, int]
    """Elements of each parameter, by canonical name."""
    transient: int = 0
    """Elements of parameters and gradients that a device holds temporarily, in addition."""
    gradient_copies: float = 0
    """Copies of all gradients at the peak of a step, in addition to the gradients themselves."""
    bucket: int | None = None
    """Elements of gradients that are alive in addition to the vector that holds all gradients and outlives the step;
    None: there is no such vector.
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
        """Return the memory of the device with the largest use; pure."""


def estimate_memory(strategy: Strategy, model: nn.Module, context: PlanContext) -> ModelMemory:
    """Return the memory of the device with the largest use, for the plan."""
    if isinstance(strategy, EstimatesMemory):
        return strategy.estimate_memory(model, context)
    return ModelMemory.whole(model)


@dataclass(frozen=True, kw_only=True)
class ReplicaPart:
    """The part of a replica that one of several devices holds and computes."""

    modules: tuple[str, ...]
    """Names of the modules that the device computes."""
    memory: ModelMemory
    """Memory of the device for parameters."""
    in_flight: int = 1
    """Largest number of shards whose tensors wait for their backward pass at once."""
    received: int = 0
    """Number of shards for which the device keeps buffers to receive inputs of its modules and gradients of their
    outputs.
    """


@runtime_checkable
class DividesReplica(Protocol):
    """A strategy under which several devices compute a replica, each some of its modules."""

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:
        """Return the part of each device, if a replica has this many shards of a step; pure."""


def replica_parts(
    strategy: Strategy, model: nn.Module, context: PlanContext, *, num_shards: int
) -> tuple[ReplicaPart, ...]:
    """Return the part of each device of a replica; one part without module names if one device computes all."""
    found: tuple[ReplicaPart, ...] = ()
    if isinstance(strategy, DividesReplica):
        found = strategy.replica_parts(model, context, num_shards=num_shards)
    return found or (ReplicaPart(modules=(), memory=estimate_memory(strategy, model, context)),)


class RankPass:
    """Forward and backward of one shard on one rank, on a copy of the model without data; used once.

    This class is the pass of a rank with a whole replica. Subclasses allocate the same tensors as their ranks, without
    data, and the plan traces them.
    """

    cuts_operations: ClassVar[bool] = False
    """Whether operations are smaller than those of a whole replica."""
    sums_in_master_dtype: ClassVar[bool] = False
    """Whether gradients of an earlier shard are kept in the masters' dtype, for any dtype of the model."""
    received_bytes: int = 0
    """Bytes of the receive buffers for tensors of other ranks for this shard; known after `loss`."""
    once_bytes: int = 0
    """Bytes that do not grow with the number of shards in flight; known after `loss`."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model to the one of the rank."""

    def keep_gradients(self, model: nn.Module) -> Sequence[Tensor]:
        """Give parameters the gradients of an earlier shard; return the gradients that the plan counts itself."""
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in trained:
            param.grad = torch.empty_like(param)
        return [param.grad for param in trained if param.grad is not None]

    def loss(self, model: nn.Module, batch: Batch, loss: Callable[[Model, Batch], Loss]) -> Loss:
        """Run the forward pass; `loss` is the objective's loss of a whole replica."""
        return loss(model, batch)

    def gradients(self, model: nn.Module) -> Sequence[Tensor]:
        """End the backward pass; return the gradients that remain on the rank."""
        return [param.grad for param in model.parameters() if param.grad is not None]


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """A shard of a step, with or without data."""

    batch: Batch
    """Its collated samples."""
    count: int
    """Number of shards of the step that a replica computes."""


@runtime_checkable
class RunsRankPasses(Protocol):
    """A strategy whose ranks allocate different tensors in a pass from one device with a whole replica."""

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:
        """Return the pass of each part of a replica, in the order of `replica_parts`; pure.

        Empty if each device computes like a single device.

        Args:
            model: the model, with or without data; unchanged.
            context: the context of the plan.
            shard: a shard of the step.
        """


def rank_passes(
    strategy: Strategy, model: nn.Module, context: PlanContext, shard: PlannedShard
) -> tuple[RankPass, ...]:
    """Return the pass of each part of a replica; empty if each device computes like a single device."""
    if not isinstance(strategy, RunsRankPasses):
        return ()
    return strategy.rank_passes(model, context, shard)


@runtime_checkable
class ShardsModel(Protocol):
    """A strategy under which each device holds a part of the model; recommended to a run that ran out of memory."""

    @classmethod
    def sharded_over(cls, count: int) -> Mapping[str, int]:
        """Return the keys of `strategy` that shard the model over `count` devices; pure."""


@runtime_checkable
class DescribesPartition(Protocol):
    """A strategy that may spread a replica over several devices."""

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return the parts of a replica; pure."""


def describe_partition(strategy: Strategy, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
    """Return the parts of a replica, for the plan; empty if it is not split."""
    return strategy.describe_partition(model, context) if isinstance(strategy, DescribesPartition) else ()


@runtime_checkable
class SizesSlots(Protocol):
    """A strategy whose tasks do not use one device each."""

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of GPUs that a job of a sweep needs on a host with `num_gpus`; without GPUs, of cores."""


def num_slots(strategy: Strategy, num_gpus: int) -> int:
    """Return the number of GPUs that a job of a sweep needs; without GPUs, one core per process."""
    if isinstance(strategy, SizesSlots):
        return strategy.num_slots(num_gpus)
    tasks = strategy.tasks(PlanContext(num_gpus=num_gpus))
    return len({task.device for task in tasks if task.device.startswith("cuda")}) or len(tasks)
