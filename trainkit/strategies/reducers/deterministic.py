"""The reproducible reducer: equal bits on any number of ranks up to the number of lanes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.numerics.batch import LaneNode, LaneSums, owned_nodes, sum_of_ranks
from trainkit.strategies.reducers.base import Reducer, Sums
from trainkit.strategies.tensors.layouts import FlatBuffer, unsplit


class DeterministicReducer(Reducer):
    """Sums lanes in the order of the tree (see `numerics.summation`).

    Each rank sums the subtrees that lie completely on it, slices of those partial sums are sent to the ranks that own
    the slices, each sums its slice in the order of the tree, and all slices are gathered.

    Args:
        num_ranks: data ranks, at most `lanes`.
    """

    lanes: int

    def __init__(self, *, lanes: int, rank: int, num_ranks: int) -> None:
        self.lanes = lanes
        self._rank, self._num_ranks = rank, num_ranks

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of a step."""
        self._parts, self._num_shards = packing.parts, num_shards
        self._own = LaneSums(_add_each, num_lanes=self.lanes, num_shards=num_shards)

    def add(self, lane: int, sums: Sums) -> None:
        """Add the sums of a lane to those of its sibling, if both exist."""
        vectors = [part.packing.pack(part.chosen(sums)) for part in self._parts]
        self._own.push(LaneNode(lane, self.lanes), vectors)

    def finish(self) -> Sums:
        """Return the sums over all lanes, in the order of the tree."""
        own, totals = self._own.take(), []
        for number, part in enumerate(self._parts):
            vectors = [of_node[number] for of_node in own]
            total = vectors[0] if self._num_ranks == 1 else self._exchange(vectors, part.packing)
            totals.append(part.packing.views(total.add_(0.0)))  # the sign of zero does not depend on the ranks
        return unsplit(self._parts, totals)

    def _exchange(self, own: list[Tensor], packing: FlatBuffer) -> Tensor:
        ranks, lanes, shards = self._num_ranks, self.lanes, self._num_shards
        nodes = [owned_nodes(rank=rank, num_ranks=ranks, num_lanes=lanes, num_shards=shards) for rank in range(ranks)]
        size = -(-packing.numel // ranks)
        padded = [nn.functional.pad(vector, (0, size * ranks - vector.numel())).view(ranks, size) for vector in own]
        sent = torch.cat(padded, dim=1).view(-1) if own else packing.empty()[:0]
        received = sent.new_empty(sum(map(len, nodes)), size)
        splits = [len(owned) * size for owned in nodes]
        dist.all_to_all_single(received.view(-1), sent, splits, [len(own) * size] * ranks)
        of_ranks = [rows.unbind() for rows in torch.split(received, [len(owned) for owned in nodes])]
        total = sum_of_ranks(Tensor.add_, of_ranks, num_lanes=lanes, num_shards=shards)
        gathered = sent.new_empty(size * ranks)
        dist.all_gather([*gathered.view(ranks, size).unbind()], total)
        return gathered[: packing.numel]


def _add_each(totals: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Add the vectors of one sum to those of another, in place."""
    return [total.add_(other) for total, other in zip(totals, others, strict=True)]
