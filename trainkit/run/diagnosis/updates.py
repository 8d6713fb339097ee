"""Hypotheses: the effect of each fault on the shards of a step, and on the update by its true gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis import matching as causes
from trainkit.run.diagnosis.evidence import Shard, StepEvidence, Tensors, averaged_buffers, combine
from trainkit.run.diagnosis.matching import Hypothesis
from trainkit.run.planning.build import make_optimizer
from trainkit.strategies.core.optimizer import restore_optimizer_state


def gradient_hypotheses(step: StepEvidence, *, rate_is_apart: bool = True) -> Iterator[Hypothesis]:
    """Yield (cause, its form, the predicted gradients); several forms of one cause count as one answer.

    Unless `rate_is_apart`, gradients were computed from an update, which a wrong learning rate changes as well.
    """
    yield from _means(step)
    yield from _unreduced(step)
    true = step.gradient
    for factor, words in _copies(step).items():
        yield causes.COUNTED_TWICE, words, {name: grad * factor for name, grad in true.items()}
        yield causes.AVERAGED, words, {name: grad / factor for name, grad in true.items()}
        if not rate_is_apart:
            yield causes.RATE, words, {name: grad * factor for name, grad in true.items()}
            yield causes.RATE, words, {name: grad / factor for name, grad in true.items()}
    yield causes.LAYOUT, "", _misread(true, step)
    if step.drawn_alike is not None:
        shards = step.drawn_alike()
        yield causes.DRAWN_ALIKE, "", combine(shards, [1.0 / step.weight] * len(shards))


def _copies(step: StepEvidence) -> dict[float, str]:
    """Return the factors by which a repeated or averaged sum is wrong."""
    found = {2.0: "", float(step.num_replicas): "", float(len(step.shards)): ""}
    return {factor: f"{factor:g} times" for factor in found if factor > 1}


def _misread(gradient: Tensors, step: StepEvidence) -> dict[str, Tensor]:
    strides = step.strides
    return {name: read_as_contiguous(grad, strides[name]) for name, grad in gradient.items() if name in strides}


def read_as_contiguous(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient as applied by a kernel that reads a contiguous gradient in the memory order of its parameter;
    unchanged if the strides do not cover one memory range.

    Example:
        >>> import torch
        >>> read_as_contiguous(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1, 2)).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    last = sum((size - 1) * stride for size, stride in zip(gradient.shape, strides, strict=True))
    if gradient.numel() == 0 or last + 1 != prod(gradient.shape):
        return gradient
    return gradient.contiguous().as_strided(gradient.shape, strides)


def _means(step: StepEvidence) -> Iterator[Hypothesis]:
    shards = step.shards
    if any(shard.weight == 0 for shard in shards):
        return
    by_shard = [1.0 / (shard.weight * len(shards)) for shard in shards]
    by_samples = [shard.size / (shard.weight * step.size) for shard in shards]
    replicas = {shard.replica for shard in shards}
    weights = {replica: sum(shard.weight for shard in step.of_replica(replica)) for replica in replicas}
    by_replica = [1.0 / (weights[shard.replica] * len(replicas)) for shard in shards]
    for words, factors in (("", by_shard), ("of replicas", by_replica), ("weighted by samples", by_samples)):
        yield causes.MEAN_OF_MEANS, words, combine(shards, factors)


def _unreduced(step: StepEvidence) -> Iterator[Hypothesis]:
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        own = step.of_replica(replica)
        weight = sum(shard.weight for shard in own)
        for total in {step.weight, weight} - {0.0}:
            yield causes.NOT_REDUCED, f"replica {replica}", combine(own, [1.0 / total] * len(own))


def buffer_hypotheses(step: StepEvidence) -> Iterator[Hypothesis]:
    """Yield (cause, its form, the predicted buffers)."""
    shards = step.shards
    yield causes.BUFFERS_UNWEIGHTED, "", averaged_buffers(shards, [1.0 / len(shards)] * len(shards), step.buffers)
    in_order = list(range(len(shards)))
    if step.in_sequence is not None and len(shards) > 1:
        yield causes.EVERY_SHARD_MOVES, "", step.in_sequence(in_order)
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        own = step.of_replica(replica)
        size = sum(shard.size for shard in own)
        words = f"replica {replica}"
        for total in {size, step.size} - {0}:
            yield causes.BUFFERS_OF_ONE, words, averaged_buffers(own, [s.size / total for s in own], step.buffers)
        if own:
            yield causes.BUFFERS_OF_ONE, words, averaged_buffers(own[-1:], [1.0], step.buffers)
        if step.in_sequence is not None and len(own) > 1:
            places = [place for place in in_order if shards[place].replica == replica]
            yield causes.BUFFERS_OF_ONE, words, step.in_sequence(places)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One step of the user's optimizer from a checkpoint, repeated for each hypothesis.

    The optimizer is torch's own loop over parameters: neither a fused kernel nor a sharded state.
    """

    cfg: RunConfig
    model: nn.Module
    """Used to find the modules that own the parameters, for the groups of the optimizer."""
    params: Mapping[str, nn.Parameter]
    """The parameters before the step; copies are updated."""
    state: Mapping[str, Tensor]
    """The tensors of the checkpoint, of which `optimizer/...` is used."""
    factor: float
    """The ratio of the step's learning rate to the base rate."""
    max_norm: float | None

    def step(
        self, gradient: Tensors, *, rate: float = 1.0, decay: float = 1.0, times: int = 1, forgets: bool = False
    ) -> Tensors:
        """Return the parameters after a step.

        Args:
            gradient: the gradient for the optimizer.
            rate: multiplies the learning rate.
            decay: multiplies the weight decay.
            times: number of decoupled decays of the parameters, including that of the optimizer.
            forgets: start with an empty state.
        """
        params = {name: nn.Parameter(param.detach().clone()) for name, param in self.params.items()}
        optimizer = make_optimizer(self._unfused(), self.model)(params)
        if not forgets:
            # the optimizer updates its state in place
            restore_optimizer_state(optimizer, params, {key: slot.clone() for key, slot in self.state.items()})
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"]) * self.factor * rate
            if "weight_decay" in group:
                group["weight_decay"] *= decay
                with torch.no_grad():
                    for param in group["params"]:
                        param.mul_((1.0 - group["lr"] * group["weight_decay"]) ** (times - 1))
        for name, param in params.items():
            if name in gradient:
                param.grad = _like(gradient[name], param)
        optimizer.step()
        return {name: param.detach() for name, param in params.items()}

    def _unfused(self) -> RunConfig:

        plain: dict[str, Any] = {key: False for key in ("fused", "foreach") if key in self.cfg.optimizer}
        return replace(self.cfg, optimizer={**self.cfg.optimizer, **plain})


def _like(gradient: Tensor, param: Tensor) -> Tensor:
    """Return the gradient with the strides of its parameter."""
    return torch.empty_like(param).copy_(gradient)


def clipped(gradient: Tensors, max_norm: float | None, *, floor: float = 1e-6) -> Tensors:
    """Return gradients scaled down to a global norm, as torch does it.

    Example:
        >>> clipped({"w": torch.tensor([3.0, 4.0])}, 1.0)["w"]
        tensor([0.6000, 0.8000])
    """
    if max_norm is None:
        return gradient
    norm = torch.stack([grad.norm() for grad in gradient.values()]).norm()
    factor = torch.clamp(max_norm / (norm + floor), max=1.0)
    return {name: grad * factor for name, grad in gradient.items()}


def update_hypotheses(step: StepEvidence, replay: Replay) -> Iterator[Hypothesis]:
    """Yield (cause, its form, the parameters after the step that it predicts)."""
    gradient = clipped(step.gradient, replay.max_norm)
    if replay.max_norm is not None:
        yield causes.NOT_CLIPPED, "", replay.step(step.gradient)
        for words, early in _clipped_apart(step, replay.max_norm):
            yield causes.CLIPPED_APART, words, replay.step(early)
            yield causes.CLIPPED_APART, words, replay.step(clipped(early, replay.max_norm))
    own = len(step.of_replica(0))
    for count in sorted({step.num_replicas, len(step.shards), own} - {0, 1}):
        yield causes.RATE, f"times {count}", replay.step(gradient, rate=float(count))
        yield causes.RATE, f"over {count}", replay.step(gradient, rate=1.0 / count)
        yield causes.DECAY_PER_SHARD, f"{count} times", replay.step(gradient, decay=float(count))
        yield causes.DECAY_PER_SHARD, f"{count} times", replay.step(gradient, times=count)
    yield causes.NOT_DECAYED, "", replay.step(gradient, decay=0.0)
    yield causes.STATE_LOST, "", replay.step(gradient, forgets=True)
    misread = {name: read_as_contiguous(grad, step.strides[name]) for name, grad in gradient.items()}
    yield causes.LAYOUT, "", replay.step(misread)


def _clipped_apart(step: StepEvidence, max_norm: float) -> Iterator[tuple[str, Tensors]]:
    """Yield the sums of gradients that were clipped by shard and by replica, as shares of the sum and as means."""
    by_shard = [[shard] for shard in step.shards]
    by_replica = [own for own in map(step.of_replica, range(step.num_replicas)) if own]
    for words, parts in (("by shard", by_shard), ("by replica", by_replica)):
        for are_means, floor in product((False, True), (1e-6, 0.0)) if len(parts) > 1 else ():
            total = Shard(gradient={}, weight=1.0, size=1)
            for part in parts:
                own = sum(shard.weight for shard in part)
                divisor = own if are_means and own else step.weight
                small = clipped(combine(part, [1.0 / divisor] * len(part)), max_norm, floor=floor)
                term = Shard(gradient=small, weight=1.0, size=1)
                total = replace(total, gradient=combine([total, term], [1.0, divisor / step.weight]))
            yield words, total.gradient
