"""The oracle of local SGD: replicas that train apart, one after the other, in one process and in float64.

Like `reference.py` it imports nothing from trainkit. Each replica has a model and a torch optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.support import reference


@dataclass(kw_only=True)
class Replica:
    """One of them, and what it trained on since the last average."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    targets: float = 0.0
    samples: float = 0.0


@dataclass(kw_only=True)
class Averaging:
    """When and how replicas are averaged."""

    replicas: int
    every: int
    lr: float | None = None
    """Rate of the outer optimizer; None: the average is taken."""
    momentum: float = 0.9
    nesterov: bool = True
    velocity: dict[str, Tensor] = field(default_factory=dict)


def train(
    averaging: Averaging,
    *,
    model: nn.Module,
    samples: Sequence[reference.Sample],
    loss_sum: reference.LossSum,
    optimizer: reference.MakeOptimizer,
    rate: Callable[[int], float],
    num_steps: int,
    global_size: int,
    micro_size: int,
    seed: int,
) -> nn.Module:
    """Train the replicas `num_steps` steps, a whole number of windows; the first of them, alike to all others."""
    models = [deepcopy(model).double().train() for _ in range(averaging.replicas)]
    replicas = [Replica(model=net, optimizer=optimizer(list(net.named_parameters()))) for net in models]
    start = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    per_epoch = -(-len(samples) // global_size)
    for step in range(num_steps):
        epoch, within = divmod(step, per_epoch)
        order = reference.order(len(samples), seed=seed, epoch=epoch)
        shards = reference.cut(order[within * global_size : (within + 1) * global_size], micro_size)
        for rank, replica in enumerate(replicas):
            _step(
                replica,
                [samples[i] for shard in shards[rank :: averaging.replicas] for i in shard],
                loss_sum,
                rate(step),
            )
        if (step + 1) % averaging.every == 0:
            _average(replicas, averaging, start)
            start = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    return models[0]


def _step(replica: Replica, batch: list[reference.Sample], loss_sum: reference.LossSum, rate: float) -> None:
    if not batch:
        return
    total, weight = loss_sum(replica.model, reference.collate(batch))
    replica.optimizer.zero_grad()
    torch.autograd.backward(total / weight)
    for group in replica.optimizer.param_groups:
        group["lr"] = rate
    replica.optimizer.step()
    replica.targets += weight
    replica.samples += len(batch)


@torch.no_grad()
def _average(replicas: list[Replica], averaging: Averaging, start: dict[str, Tensor]) -> None:
    targets = [replica.targets for replica in replicas]
    named = [dict(replica.model.named_parameters()) for replica in replicas]
    for name, before in start.items():
        mean = _mean([params[name] for params in named], targets)
        if averaging.lr is not None:
            moved = before - mean
            velocity = averaging.momentum * averaging.velocity.get(name, torch.zeros_like(moved)) + moved
            averaging.velocity[name] = velocity
            mean = before - averaging.lr * (moved + averaging.momentum * velocity if averaging.nesterov else velocity)
        states = [r.optimizer.state.get(params[name], {}) for r, params in zip(replicas, named, strict=True)]
        for slot, value in states[0].items():
            if value.dim():
                value.copy_(_mean([state.get(slot, value) for state in states], targets))
        for params, state in zip(named, states, strict=True):
            params[name].copy_(mean)
            state.update({slot: value.clone() for slot, value in states[0].items()})
    for name, buffer in replicas[0].model.named_buffers():
        buffers = [replica.model.get_buffer(name) for replica in replicas]
        if buffer.is_floating_point():
            buffer.copy_(_mean(buffers, [replica.samples for replica in replicas]))
        for other in buffers:
            other.copy_(buffer)
    for replica in replicas:
        replica.targets = replica.samples = 0.0


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum((value * weight for value, weight in zip(values, weights, strict=True)), torch.zeros_like(values[0]))
    return total / sum(weights)
