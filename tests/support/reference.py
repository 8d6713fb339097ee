"""The oracle: what a training must compute, as a plain float64 loop in one process.

It imports nothing from trainkit, derives the order of the samples itself, and takes no short cut: no fused kernels, no
batching tricks, sums instead of means. Where a strategy and this loop differ by more than rounding, the strategy is
wrong. docs/numbers.md is the text of what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

MASK = (1 << 64) - 1

Sample = tuple[Tensor, ...]
LossSum = Callable[[nn.Module, Sample], tuple[Tensor, float]]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def chain(*parts: int) -> int:
    """Numbers, in order, to 64 bits."""
    state = 0
    for part in parts:
        state = mix(state ^ part & MASK)
    return state


def order(num_samples: int, *, seed: int, epoch: int) -> list[int]:
    """The sample at every position of an epoch: six Feistel rounds, walked until inside the dataset."""
    bits = (num_samples - 1).bit_length()
    low = bits - bits // 2

    def permute(x: int) -> int:
        left, right, width = x >> low, x & (1 << low) - 1, bits // 2
        for number in range(6):
            left, right = right, left ^ mix(chain(seed, epoch, number) ^ right) & (1 << width) - 1
            width = bits - width
        return left << low | right

    def at(position: int) -> int:
        x = permute(position)
        while x >= num_samples:
            x = permute(x)
        return x

    return [at(position) for position in range(num_samples)]


def cut(batch: Sequence[int], micro_size: int) -> list[Sequence[int]]:
    """A batch in as few shards of at most `micro_size` as it takes, their sizes differing by one at most."""
    number = -(-len(batch) // micro_size)
    bounds = [0]
    for shard in range(number):
        bounds.append(bounds[-1] + len(batch) // number + (shard < len(batch) % number))
    return [batch[start:stop] for start, stop in pairwise(bounds)]


@dataclass(kw_only=True)
class Trained:
    """What the loop ended with, and what it saw."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    """The mean loss of every step, over all targets of its global batch."""
    samples: list[list[int]] = field(default_factory=list)
    """The samples of every step, in order."""
    rates: list[float] = field(default_factory=list)
    gradient_norms: dict[str, float] = field(default_factory=dict)
    """The largest norm that the gradient of a parameter had."""


def train(
    model: nn.Module,
    samples: Sequence[Sample],
    loss_sum: LossSum,
    *,
    optimizer: MakeOptimizer,
    rate: Callable[[int], float],
    num_steps: int,
    global_size: int,
    micro_size: int | None = None,
    seed: int = 0,
    max_norm: float | None = None,
    shuffle: bool = True,
    leave_out: Collection[int] = (),
) -> Trained:
    """Train a copy of a model, in float64.

    Args:
        model: the model at step 0; left as it is.
        samples: the dataset, one tuple of tensors a sample.
        loss_sum: (model, collated samples) -> (sum over targets of the loss, number of targets).
        optimizer: named parameters -> a torch optimizer.
        rate: update from 0 -> learning rate of every parameter group.
        num_steps: updates.
        global_size: samples an update.
        micro_size: samples a shard, at most; matters to batch statistics alone. None: one shard.
        seed: of the order.
        max_norm: the global gradient norm above which gradients are scaled down.
        shuffle: False keeps the dataset's own order.
        leave_out: steps of which nothing but the number is used.

    Returns:
        The trained copy, with losses, samples, rates and gradient norms.
    """
    model = deepcopy(model).double().train()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    rule = optimizer(named)
    trained = Trained(model=model)
    steps_per_epoch = -(-len(samples) // global_size)
    for step in (step for step in range(num_steps) if step not in leave_out):
        epoch, within = divmod(step, steps_per_epoch)
        sequence = order(len(samples), seed=seed, epoch=epoch) if shuffle else range(len(samples))
        batch = list(sequence)[within * global_size : (within + 1) * global_size]
        shards = cut(batch, micro_size or global_size)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after = {name: torch.zeros_like(buffer) for name, buffer in before.items()}
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for shard in shards:
            for name, buffer in model.named_buffers():
                buffer.data = before[name].clone()
            shard_sum, shard_weight = loss_sum(model, collate([samples[index] for index in shard]))
            total, weight = total + shard_sum, weight + shard_weight
            for name, buffer in model.named_buffers():
                share = buffer * (len(shard) / len(batch))
                after[name] = after[name] + share if buffer.is_floating_point() else buffer.clone()
        for name, buffer in model.named_buffers():
            buffer.data = after[name]
        rule.zero_grad()
        torch.autograd.backward(total / weight)
        for name, parameter in named:
            norm = 0.0 if parameter.grad is None else float(parameter.grad.norm())
            trained.gradient_norms[name] = max(norm, trained.gradient_norms.get(name, 0.0))
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
        for group in rule.param_groups:
            group["lr"] = rate(step)
        rule.step()
        trained.losses.append(float(total.detach()) / weight)
        trained.samples.append(batch)
        trained.rates.append(rate(step))
    return trained


def collate(samples: Sequence[Sample]) -> Sample:
    stacked = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return tuple(part.double() if part.is_floating_point() else part for part in stacked)


def sgd(*, momentum: float = 0.0, weight_decay: float = 0.0) -> MakeOptimizer:
    """Plain SGD, one parameter after the other."""
    return lambda named: torch.optim.SGD(
        [p for _, p in named], lr=0.0, momentum=momentum, weight_decay=weight_decay, foreach=False, fused=False
    )


def adamw(*, weight_decay: float = 0.01, no_decay: Callable[[str], bool] = lambda _: False) -> MakeOptimizer:
    """Plain AdamW; the parameters that `no_decay` names are spared its weight decay."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [p for name, p in named if not no_decay(name)]
        spared = [p for name, p in named if no_decay(name)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, foreach=False, fused=False)

    return make


def differences(actual: dict[str, Tensor], expected: Trained, *, tolerance: float = 1e-12) -> list[str]:
    """The parameters and buffers that differ by more than rounding, each with its error; empty where all agree.

    The error is the norm of the difference over the norm of the expected value. A parameter whose gradient is zero in
    exact arithmetic (the bias of an attention's keys) moves by rounding alone and has no relative error: one whose
    gradient norm stayed under 1e-12 of the largest is held to 1e-8 x the sum of the learning rates.
    """
    exact = {name: value.detach() for name, value in expected.model.named_parameters()}
    exact |= dict(expected.model.named_buffers())
    errors = [f"{name}: missing" for name in exact.keys() - actual.keys()]
    errors += [f"{name}: unexpected" for name in actual.keys() - exact.keys()]
    largest = max(expected.gradient_norms.values())
    for name in sorted(exact.keys() & actual.keys()):
        error = float((actual[name].double() - exact[name].double()).norm())
        if expected.gradient_norms.get(name, largest) < 1e-12 * largest:
            if error > 1e-8 * sum(expected.rates):
                errors.append(f"{name}: absolute error {error:.3g} of a parameter whose gradient is zero")
        elif error > tolerance * float(exact[name].double().norm()):
            errors.append(f"{name}: relative error {error / float(exact[name].double().norm()):.3g}")
    return errors
