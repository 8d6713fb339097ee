"""Reducers that sum the flat vector of a step by the operations of its process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.groups.pairwise import exchange
from trainkit.strategies.reducers.gradient_vector import FlatReducer
from trainkit.strategies.tensors.layouts import FlatBuffer


class ReduceThenBroadcastReducer(FlatReducer):
    """Reduce to rank 0, then broadcast. Useful when rank 0 has the fastest link.

    Source: tf.distribute.ReductionToOneDevice.
    """

    def sum(self, flat: Tensor) -> None:
        """Sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=0, op=dist.ReduceOp.SUM)
        dist.broadcast(flat, src=0)


class HierarchicalReducer(FlatReducer):
    """Reduces to the first rank of each host, all-reduces among those ranks, and broadcasts on each host.

    Args:
        hosts: the host of every rank, as arbitrary numbers; construction is collective.

    Source: tf.distribute.HierarchicalCopyAllReduce.
    """

    def __init__(self, hosts: Sequence[int], *, rank: int, timeout_s: float) -> None:
        super().__init__()
        members = {host: [other for other, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
        timeout = timedelta(seconds=timeout_s)
        # Every rank creates every group in the same order, as torch requires.
        groups = {host: dist.new_group(ranks, timeout=timeout) for host, ranks in members.items()}
        self._leaders = dist.new_group([ranks[0] for ranks in members.values()], timeout=timeout)
        self._leads = members[hosts[rank]][0] == rank
        self._leader = members[hosts[rank]][0]
        self._host = groups[hosts[rank]]

    def sum(self, flat: Tensor) -> None:
        """Sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=self._leader, op=dist.ReduceOp.SUM, group=self._host)
        if self._leads:
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._leaders)
        dist.broadcast(flat, src=self._leader, group=self._host)


class RingReducer(FlatReducer):
    """Reduce-scatter, then all-gather, each in n - 1 rounds of one slice to the right and one from the left.

    Slice *s* is summed in the order of the ranks from *s* on, by one rank, so all ranks end with equal bits.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._rank, self._num_ranks = collective.rank, collective.num_ranks

    def allocate(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part, and allocate a receive buffer for a slice."""
        flat = super().allocate(packing)
        self._slices = flat.tensor_split(self._num_ranks)
        self._received = torch.empty_like(self._slices[0])  # the first slice is the longest
        return flat

    def sum(self, flat: Tensor) -> None:  # noqa: ARG002 - the slices are of `flat`
        """Sum over all ranks, in place; collective."""
        count, slices = self._num_ranks, self._slices
        for turn in range(count - 1):
            incoming = slices[(self._rank - turn - 1) % count]
            received = self._received[: incoming.numel()]
            self._shift(slices[(self._rank - turn) % count], received)
            incoming.add_(received)
        for turn in range(count - 1):
            self._shift(slices[(self._rank - turn + 1) % count], slices[(self._rank - turn) % count])

    def _shift(self, sent: Tensor, received: Tensor) -> None:
        """Send one slice to the right and receive one from the left."""
        right, left = ((self._rank + turn) % self._num_ranks for turn in (1, -1))
        exchange([(right, sent)], [(left, received)])
