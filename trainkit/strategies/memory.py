"""The values by which strategies describe the memory of their devices for the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainkit.objectives.base import Loss, Model
from trainkit.strategies.step_values import Batch


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


class RankPass:
    """Forward and backward of one shard on one rank, on a copy of the model without data; used once.

    This class is the pass of a rank with a whole replica. Subclasses allocate the same tensors as their ranks, without
    data, and the plan traces them.
    """

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
