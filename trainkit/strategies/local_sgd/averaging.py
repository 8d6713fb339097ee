"""Average the parameters, optimizer state and buffers of replicas, as one flat vector in one exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.fields import above, below, maths
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.tensors.layouts import FlatBuffer, dense_strides, in_layout
from trainkit.strategies.tensors.lazy_state import select

_SLOT = "optimizer/outer_momentum/"


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """The outer optimizer: SGD on the change of the parameters between two averages.

    With x the parameters after the last average, m the new average, d = x - m, and v = momentum v + d:
    x <- x - lr (d + momentum v) with Nesterov's momentum, x - lr v without. A rate of 1 without momentum gives m.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 (rate 0.7, momentum 0.9).
    """

    lr: Annotated[float | None, maths, above(0)] = None
    """Rate of the outer optimizer; null: the average itself becomes the parameters."""
    momentum: Annotated[float, maths, below(0, 1)] = 0.9
    """Momentum of the outer optimizer."""
    nesterov: Annotated[bool, maths] = True
    """Nesterov's momentum instead of heavy-ball momentum."""


@dataclass(kw_only=True)
class AveragingWindow:
    """The steps since the last average, and the state of the outer optimizer."""

    outer: OuterOptimizer
    """The outer optimizer, which computes the next parameters from the average."""
    steps: int = 0
    """Steps since the last average, the same on every rank."""
    targets: Tensor | float = 0.0
    """Number of targets of this rank in these steps."""
    samples: float = 0.0
    """Number of samples of this rank in these steps."""
    start: Tensor | None = None
    """The parameters at the last average, one flat vector; only with an outer optimizer."""
    states: list[Tensor] = field(default_factory=list)
    """State per sample at the last average: the changes of all ranks are added to it."""
    momentum: Tensor | None = None
    """The outer optimizer's momentum, one flat vector; None before its first step."""

    def begin(self, replica: Replica) -> None:
        """Store the parameters and the state per sample at the start of the window."""
        if self.steps == 0:
            self.states = [state.clone() for state in replica.buffers.per_sample()]
        if self.steps == 0 and self.outer.lr is not None:
            self.start = _parameters(replica).pack(list(replica.masters.values()), into=self.start)

    def record(self, targets: Tensor | float, samples: int) -> None:
        """Count a step of this rank."""
        self.steps += 1
        self.targets = self.targets + targets
        self.samples += samples

    @torch.no_grad()
    def average(self, replica: Replica) -> None:
        """Average the replicas; collective, unless there is one.

        Parameters and optimizer state are weighted by the targets of their rank, buffers by its samples; counters
        (Adam's steps, integer buffers) are taken from rank 0, which has a shard of every step.
        """
        if replica.num_ranks > 1:
            _make_state(replica)
            self._exchange(replica)
        if self.outer.lr is not None:
            self._step_outside(replica, self.outer.lr)
        replica.refresh_params()
        self.steps, self.targets, self.samples = 0, 0.0, 0.0

    def _exchange(self, replica: Replica) -> None:
        weighed, counters = _trained(replica)
        states = replica.buffers.per_sample()
        for state, start in zip(states, self.states, strict=True):
            moved = state.to(replica.precision.master_dtype).sub_(start)
            dist.all_reduce(moved)
            state.copy_(moved.add_(start))
        held = set(map(id, states))
        buffers = [buffer for buffer in replica.buffers.tensors() if id(buffer) not in held]
        counters += [buffer for buffer in buffers if not buffer.is_floating_point()]
        buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        tensors = [*weighed, *buffers, *counters]
        packing = FlatBuffer(
            [*(tensor.shape for tensor in tensors), torch.Size([2])],
            replica.precision.master_dtype,
            replica.device,
            strides=[*map(dense_strides, tensors), None],
        )
        flat = packing.pack([*tensors, None])
        by_targets, by_samples, counts, totals = flat.split_with_sizes(
            _lengths(weighed, buffers, counters, flat.numel())
        )
        # A rank without targets must not count, and a window without any must not divide by zero.
        totals[0], totals[1] = self.targets, self.samples
        totals.clamp_(min=1e-20)
        by_targets.mul_(totals[0])
        by_samples.mul_(totals[1])
        counts.mul_(float(replica.rank == 0))  # exact in float32 up to 2^24, as Adam's own count is
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        by_targets.div_(totals[0])
        by_samples.div_(totals[1])
        torch._foreach_copy_(tensors, packing.views(flat)[:-1])

    def _step_outside(self, replica: Replica, lr: float) -> None:
        masters: list[Tensor] = list(replica.masters.values())
        packing, outer = _parameters(replica), self.outer
        assert self.start is not None
        moved = self.start - packing.pack(masters)
        if outer.momentum:
            momentum = torch.zeros_like(moved) if self.momentum is None else self.momentum
            self.momentum = momentum.mul_(outer.momentum).add_(moved)
            moved = moved.add_(self.momentum, alpha=outer.momentum) if outer.nesterov else self.momentum
        torch._foreach_copy_(masters, packing.views(self.start.sub_(moved, alpha=lr)))

    def state(self, replica: Replica) -> dict[str, Tensor]:
        """Return the outer optimizer's momentum as `optimizer/outer_momentum/<name>`; no copies."""
        if self.momentum is None:
            return {}
        views = _parameters(replica).views(self.momentum)
        return {_SLOT + name: view for name, view in zip(replica.masters, views, strict=True)}

    def load_state(self, replica: Replica, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Load the result of `state`; return the tensors that do not belong to the outer optimizer."""
        own = [tensors.get(_SLOT + name) for name in replica.masters]
        kept = self.outer.lr is not None and any(tensor is not None for tensor in own)
        self.momentum = _parameters(replica).pack(own) if kept else None
        return select(tensors, lambda name: not name.startswith(_SLOT))


def _parameters(replica: Replica) -> FlatBuffer:
    return FlatBuffer.like(list(replica.masters.values()), replica.precision.master_dtype, replica.device)


def _trained(replica: Replica) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters with the optimizer's tensors, and its counters; in canonical order, the same on every rank."""
    weighed: list[Tensor] = [master.detach() for master in replica.masters.values()]
    counters: list[Tensor] = []
    (optimizer,) = replica.stepper.optimizers
    for master in replica.masters.values():
        kept: dict[str, Any] = optimizer.state.get(master, {})
        for slot, value in sorted(kept.items()):
            if isinstance(value, Tensor):
                if value.is_sparse:  # momentum of sparse gradients, whose rows differ between ranks
                    kept[slot] = in_layout(value.to_dense(), master.stride())
                (weighed if value.dim() else counters).append(kept[slot])
    return weighed, counters


def _make_state(replica: Replica) -> None:
    """Make the optimizer of a rank that had no shards yet create its state, by a step with learning rate 0."""
    (optimizer,) = replica.stepper.optimizers
    if not optimizer.state:
        zeros: list[Tensor | None] = [
            torch.zeros_like(master) if used else None
            for master, used in zip(replica.masters.values(), replica.used, strict=True)
        ]
        for place, dims in (replica.sparse or {}).items():
            zeros[place] = torch.zeros_like(replica.trained[place]).to_sparse(dims)
        replica.stepper.step(zeros, 0.0)


def _lengths(weighed: list[Tensor], buffers: list[Tensor], counters: list[Tensor], numel: int) -> list[int]:
    lengths = [sum(tensor.numel() for tensor in group) for group in (weighed, buffers, counters)]
    return [*lengths, numel - sum(lengths)]
