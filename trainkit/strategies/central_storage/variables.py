"""Copies of the central model on the devices that compute, each refreshed from it after every update."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainkit.numerics.generators import GENERATORS_LOCK
from trainkit.numerics.randomness import BlockKeys, forget_keys
from trainkit.objectives.base import Loss
from trainkit.strategies.base import Placed
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.model_transforms.recomputing import Recomputed

__all__ = ["CentralVariables", "ThreadWork", "computing_copy", "refresh", "sync_discovered"]


@dataclass(kw_only=True)
class CentralVariables(Placed):
    """The variables, and the copies that compute."""

    variables: Replica
    """The model whose parameters are updated, on the parameter device, with the optimizer."""
    copies: list[Replica]
    """A replica a compute device."""
    threads: ThreadPoolExecutor
    """A thread a copy."""
    flight: Any = None
    """What is under way, where updates are asynchronous."""
    had_threads: int = field(default_factory=torch.get_num_threads)
    """Torch's threads before this strategy divided them."""

    def refresh(self, *copies: Replica, frozen: bool = False) -> None:
        """Bring copies up to date, all where none is named."""
        refresh(copies or self.copies, self.variables, frozen=frozen)

    def scale_from_here(self) -> None:
        """Give everybody the current loss scale."""
        for one in (self.variables, *self.copies):
            one.loss_scale = self.loss_scale

    def settle(self, first: Replica) -> None:
        """Let everybody know of the gradients and buffers what one copy has discovered."""
        sync_discovered(first, (self.variables, *(other for other in self.copies if other is not first)))


def refresh(copies: Iterable[Replica], source: Replica, *, frozen: bool = False) -> None:
    """Bring copies up to date: buffers, and parameters with memory of their own; those not trained only if asked."""
    for one in copies:
        _copy(_params(one, frozen=frozen), _params(source, frozen=frozen))
        _copy(list(one.model.buffers()), list(source.model.buffers()))


def _params(replica: Replica, *, frozen: bool) -> list[nn.Parameter]:
    return list(replica.model.parameters()) if frozen else replica.trained


def sync_discovered(first: Replica, others: Iterable[Replica]) -> None:
    """Let others know of the gradients and buffers what one copy has discovered."""
    assert first.packing is not None
    for one in others:
        one.used, one.some_unused = first.used, first.some_unused
        one.sparse, one.exchanged = first.sparse, first.exchanged
        one.buffers.settle_like(first.buffers)
        one.packing = first.packing.on(one.device)


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        if tensor.data_ptr() != value.data_ptr():
            tensor.data.copy_(value)


def computing_copy(variables: Replica, device: torch.device, *, shares: bool) -> Replica:
    """A replica for a device to compute with.

    Args:
        variables: the central model.
        device: where the copy computes.
        shares: whether, on the variables' own device, its parameters are in their memory.
    """
    held = {id(p): _on(p, device, shares=shares) for p in variables.model.parameters()}
    model = copy.deepcopy(variables.model, held).to(device)
    forget_keys(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return Replica(
        model=model,
        device=device,
        data_ranks=variables.data_ranks,
        loss_scale=variables.loss_scale,
        precision=variables.precision,
        lanes=variables.lanes,
        params=params,
        masters=variables.masters if variables.masters_apart else params,
        stepper=variables.stepper,
        buffers=StepBuffers(model, variables.precision.master_dtype),
        keys=BlockKeys(model, seed=variables.numerics.seed, devices=[device], drawing=variables.keys.drawing),
        reducer=variables.reducer,
        numerics=variables.numerics,
    )


def _on(param: nn.Parameter, device: torch.device, *, shares: bool) -> nn.Parameter:
    return nn.Parameter(param.detach().to(device, copy=not shares), requires_grad=param.requires_grad)


class ThreadWork(ShardStep):
    """The shards of one thread. Threads take turns while they draw from generators that all of them share."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        draws = self.replica.keys.draw_on_host(self.training.objective)
        recomputes = draws and any(isinstance(module.forward, Recomputed) for module in self.replica.model.modules())
        self._around_forward = GENERATORS_LOCK if draws else nullcontext()
        self._around_shard = GENERATORS_LOCK if recomputes else nullcontext()

    def _shard(self, shard: int, batch: Any) -> Any:
        with self._around_shard:
            return super()._shard(shard, batch)

    def _forward(self, shard: int, batch: Any) -> Loss:
        with self._around_forward:
            return super()._forward(shard, batch)
