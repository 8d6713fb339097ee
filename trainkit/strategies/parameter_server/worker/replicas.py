"""The devices of a worker: they share the shards of a work order, and the sum of their gradients is pushed once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, shards_of_rank
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.central_storage.step import computed, moved, total_of
from trainkit.strategies.central_storage.variables import (
    ThreadWork,
    computing_copy,
    refresh,
    sync_discovered,
)
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor, cloned_batch

__all__ = ["Computed", "WorkerReplicas"]

_Sums = Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The result of a work order."""

    sums: list[_Sums]
    """Gradients, sums of buffers, and the counted weight if there is one: of all shards together, or of each if the
    order of summation is reproducible.
    """
    weights: list[float]
    """The weights of the shards of each."""
    divisor: LossDivisor
    """The divisor of the loss."""
    loss_sum: float


@dataclass(kw_only=True)
class _ReplicaShards:
    """The work of a replica that is computed at once, and its result."""

    place: int
    """The position of its first shard in the work order."""
    rank: int
    """The rank of the replica."""
    work: ThreadWork
    sums: _Sums = ()

    def compute(self) -> None:
        """Compute the sums, on the device of the replica."""
        ((_, self.sums),) = computed(self.work)

    def move(self, device: torch.device) -> None:
        """Move the sums to a device."""
        self.sums = moved(self.sums, device)


class WorkerReplicas:
    """Replicas of a model, one thread each; a single replica computes on the caller's thread.

    Args:
        first: its model holds the variables read from the servers, and the results are collected on its device.
        devices: of all replicas, its own first.

    Source: replicas within a worker of tf.distribute.ParameterServerStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    def __init__(self, first: Replica, devices: Sequence[torch.device]) -> None:
        self.first = first
        self.replicas = [first, *(computing_copy(first, one, shares=one == first.device) for one in devices[1:])]
        self._apart = first.numerics.reproducible
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="compute") if len(devices) > 1 else None
        self._had_threads = torch.get_num_threads()
        if self._threads is not None and first.device.type == "cpu":
            torch.set_num_threads(max(self._had_threads // len(devices), 1))

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            torch.set_num_threads(self._had_threads)

    def refresh(self, *, frozen: bool) -> None:
        """Copy the parameters of the first replica to all others.

        Args:
            frozen: whether to copy untrained ones, too.
        """
        refresh(self.replicas[1:], self.first, frozen=frozen)

    def compute(
        self, ticket: Ticket, batches: Sequence[Batch], training: StepContext, *, loss_scale: LossScale, batch_size: int
    ) -> Computed:
        """Compute forward and backward of the shards of a work order.

        Args:
            ticket: shards of a step.
            batches: one per shard, on the first device.
            training: plan, objective and update rule.
            loss_scale: factor of the gradients.
            batch_size: samples of the update that these shards belong to.
        """
        for replica in self.replicas:
            replica.set_loss_scale(loss_scale)
        parts = self._parts(ticket, batches, training, batch_size)
        if self.first.packing is None:
            parts[0].work.agree_on_grad_layout()
            sync_discovered(self.first, self.replicas[1:])
        self._run(parts)
        parts.sort(key=lambda part: part.place)
        weights = [float(part.work.weight) for part in parts]
        sums = [part.sums for part in parts]
        if not self._apart:
            weights, sums = [sum(weights)], [total_of(sums)]
        loss_sum = sum(float(part.work.loss_sum) for part in parts if part.work.loss_sum is not None)
        return Computed(sums=sums, weights=weights, divisor=parts[0].work.divisor, loss_sum=loss_sum)

    def _parts(
        self, ticket: Ticket, batches: Sequence[Batch], training: StepContext, batch_size: int
    ) -> list[_ReplicaShards]:
        """Assign the shards to the replicas in turn; each shard is separate work if the order of summation
        uses lanes.
        """
        parts = []
        for rank, replica in enumerate(self.replicas):
            own = shards_of_rank(len(batches), rank=rank, num_ranks=len(self.replicas), lanes=None)
            for places in [own] if own and not self._apart else [(place,) for place in own]:
                given = Ticket(ticket.step, tuple(ticket.shards[place] for place in places))
                own_batches = [to_device(batches[place], replica.device) for place in places]
                if self._apart:
                    own_batches = [cloned_batch(batch) for batch in own_batches]
                work = ThreadWork(replica, given, own_batches, training, batch_size)
                parts.append(_ReplicaShards(place=places[0], rank=rank, work=work))
        return parts

    def _run(self, parts: Sequence[_ReplicaShards]) -> None:
        if self._threads is None:
            _compute(parts)
            return
        shares = [list(own) for _, own in groupby(parts, key=lambda part: part.rank)]
        running = [self._threads.submit(_compute, own) for own in shares]
        wait(running)  # even if one fails: no thread may compute while the replicas are torn down
        for one in running:
            one.result()
        for part in parts:
            part.move(self.first.device)


def _compute(parts: Sequence[_ReplicaShards]) -> None:
    """Compute the parts of one thread."""
    for part in parts:
        part.compute()
