"""Reducers that exchange one flat vector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.reducers.backend import GradientVector, cut_into_buckets
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.tensors.layouts import FlatBuffer

_BUCKET_BYTES: Final = 25 * 2**20
"""Bytes of gradients that are copied into the vector together."""


class FlatReducer(Reducer):
    """Sums the vector that holds the gradients of a step over the ranks, in one exchange; subclasses implement
    `sum`.
    """

    _vector: GradientVector | None = None
    _reducing: bool = False

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums over all ranks. A rank without shards adds zeros."""
        vector = self._vector
        if vector is None:
            buckets = cut_into_buckets(packing, bucket_bytes=_BUCKET_BYTES, part_tail=True)
            vector = self._vector = GradientVector(packing, self.allocate(packing), buckets)
        vector.begin_step()
        self._reducing = True
        sums: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, sums in partials:  # noqa: B007 - without lanes there is at most one
            pass
        self._reducing = False
        vector.fill_rest(sums)
        note_exchange(vector.flat)
        self.sum(vector.flat)
        return vector.views

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass."""
        if self._reducing and self._vector is not None:
            self._vector.begin_backward(params, is_last=is_last)

    def end_backward(self) -> None:
        """Collect gradients that filled no bucket."""
        if self._reducing and self._vector is not None:
            self._vector.end_backward()

    def allocate(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part, (numel,); the same one for all steps, since new memory costs page
        faults.
        """
        return packing.empty()

    @abstractmethod
    def sum(self, flat: Tensor) -> None:
        """Replace every rank's vector by the sum of all, equal bits on all ranks; collective."""

    def close(self) -> None:
        """Remove the hooks from the parameters, and release the vector."""
        if self._vector is not None:
            self._vector.close()
            self._vector = None


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
        """Send one slice to the right and receive one from the left; an empty one is not sent."""
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, (self._rank + 1) % self._num_ranks))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, (self._rank - 1) % self._num_ranks))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
