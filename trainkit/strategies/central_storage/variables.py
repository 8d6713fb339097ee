"""Copies of the central model on the devices that compute, each refreshed from it after every update."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import GENERATORS_LOCK
from trainkit.numerics.precision import LossScale
from trainkit.numerics.randomness import BlockKeys, forget_keys
from trainkit.objectives.base import Loss
from trainkit.strategies.base import Batch, LocalModel, PhaseListener, StepContext, ignore_phase
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.replica import PlacedModel, Replica, ReplicaParts
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.model_transforms.recomputing import Recomputed

__all__ = ["CentralVariables", "ThreadWork", "computing_copy", "refresh", "sync_discovered"]


class CentralVariables:
    """The variables, and the copies that compute.

    Args:
        variables: the model whose parameters are updated, on the parameter device, with the optimizer.
        copies: a replica a compute device.
        local: the model that is evaluated.
    """

    def __init__(self, variables: Replica, copies: Sequence[Replica], local: LocalModel) -> None:
        self.variables, self.copies, self.local = variables, list(copies), local
        self.threads = ThreadPoolExecutor(len(copies), thread_name_prefix="compute")
        """A thread a copy."""
        on_cpu = sum(one.device.type == "cpu" for one in copies)
        self._had_threads = torch.get_num_threads()
        torch.set_num_threads(max(self._had_threads // max(on_cpu, 1), 1))

    def close(self) -> None:
        """End the threads, and give torch its own back."""
        self.threads.shutdown()
        torch.set_num_threads(self._had_threads)

    def refresh(self, *copies: Replica, frozen: bool = False) -> None:
        """Bring copies up to date, all where none is named."""
        refresh(copies or self.copies, self.variables, frozen=frozen)

    def set_loss_scale(self, scale: LossScale) -> None:
        """Give the variables, the copies and the local model a loss scale."""
        for one in (self.local, self.variables, *self.copies):
            one.set_loss_scale(scale)

    def settle(self, first: Replica) -> None:
        """Give the variables and the other copies what one copy has discovered of the gradients and buffers."""
        sync_discovered(first, (self.variables, *(other for other in self.copies if other is not first)))


def refresh(copies: Iterable[Replica], source: Replica, *, frozen: bool = False) -> None:
    """Bring copies up to date: buffers, and parameters with memory of their own; those not trained only if asked."""
    for one in copies:
        _copy(_params(one, frozen=frozen), _params(source, frozen=frozen))
        _copy(list(one.model.buffers()), list(source.model.buffers()))


def _params(replica: Replica, *, frozen: bool) -> list[nn.Parameter]:
    return list(replica.model.parameters()) if frozen else replica.trained


def sync_discovered(first: Replica, others: Iterable[Replica]) -> None:
    """Give other replicas what one copy has discovered of the gradients and buffers."""
    for one in others:
        one.adopt_layout(first)


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        if tensor.data_ptr() != value.data_ptr():
            tensor.data.copy_(value)


def computing_copy(
    variables: Replica, device: torch.device, *, shares: bool, on_phase: PhaseListener = ignore_phase
) -> Replica:
    """Return a replica for a device to compute with.

    Args:
        variables: the central model.
        device: where the copy computes.
        shares: whether, on the variables' own device, its parameters are in their memory.
        on_phase: receives (phase, step) of what it computes.
    """
    held = {id(p): _on(p, device, shares=shares) for p in variables.model.parameters()}
    model = copy.deepcopy(variables.model, held).to(device)
    forget_keys(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = variables.masters if variables.masters_apart else params
    return Replica(
        ReplicaParts(
            held=PlacedModel(model=model, params=params, masters=masters),
            device=device,
            device_types=(device.type,),
            data_ranks=variables.data_ranks,
            all_ranks=variables.data_ranks,
            precision=variables.precision,
            stepper=variables.stepper,
            buffers=StepBuffers(model, variables.precision.master_dtype),
            keys=BlockKeys(model, seed=variables.numerics.seed, devices=[device], drawing=variables.keys.drawing),
            reducer=variables.reducer,
            numerics=variables.numerics,
            on_phase=on_phase,
        )
    )


def _on(param: nn.Parameter, device: torch.device, *, shares: bool) -> nn.Parameter:
    return nn.Parameter(param.detach().to(device, copy=not shares), requires_grad=param.requires_grad)


class ThreadWork(ShardStep):
    """The shards of one thread. Threads take turns while they draw from generators that all of them share."""

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(replica, ticket, batches, training, batch_size)
        draws = self.replica.keys.draw_on_host(self.training.objective)
        recomputes = draws and any(isinstance(module.forward, Recomputed) for module in self.replica.model.modules())
        self._around_forward = GENERATORS_LOCK if draws else nullcontext()
        self._around_shard = GENERATORS_LOCK if recomputes else nullcontext()

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        with self._around_shard:
            return super()._shard(shard, batch)

    def _forward(self, shard: int, batch: Batch) -> Loss:
        with self._around_forward:
            return super()._forward(shard, batch)
