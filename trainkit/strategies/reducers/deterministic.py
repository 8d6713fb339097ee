"""The reproducible reducer: equal bits on any number of ranks up to the number of lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.numerics.summation import LaneNode, combine_pairwise, owned_nodes
from trainkit.strategies.groups.pairwise import exchange
from trainkit.strategies.reducers.base import Partials, Reducer
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

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """Return the sums over all lanes, in the order of the tree."""
        parts = packing.parts
        leaves = (
            (LaneNode(lane, self.lanes), [part.packing.pack(part.chosen(sums)) for part in parts])
            for lane, sums in partials
        )
        own = [
            combine_pairwise(_below(node, leaves, self.lanes, num_shards), _add_each, num_lanes=self.lanes)
            for node in self._nodes(self._rank, num_shards)
        ]
        totals = []
        for number, part in enumerate(parts):
            vectors = [of_node[number] for of_node in own]
            total = vectors[0] if self._num_ranks == 1 else self._exchange(vectors, num_shards, part.packing)
            totals.append(part.packing.views(total))
        return unsplit(parts, totals)

    def _nodes(self, rank: int, num_shards: int) -> tuple[LaneNode, ...]:
        return owned_nodes(rank=rank, num_ranks=self._num_ranks, num_lanes=self.lanes, num_shards=num_shards)

    def _exchange(self, own: list[Tensor], num_shards: int, packing: FlatBuffer) -> Tensor:
        ranks = self._num_ranks
        nodes = [self._nodes(rank, num_shards) for rank in range(ranks)]
        slice_size = -(-packing.numel // ranks)
        padded = slice_size * ranks
        outgoing = [nn.functional.pad(part, (0, padded - part.numel())).view(ranks, slice_size) for part in own]
        sent = [torch.stack([part[rank] for part in outgoing]) if own else _empty(packing) for rank in range(ranks)]
        received = [
            torch.empty((len(nodes[rank]), slice_size), dtype=packing.dtype, device=packing.device)
            for rank in range(ranks)
        ]
        _all_to_all(received, sent, self._rank)
        parts = {node: received[rank][place] for rank in range(ranks) for place, node in enumerate(nodes[rank])}
        in_order = sorted(parts, key=lambda node: _tree_position(node.first, self.lanes))
        total = combine_pairwise(((node, parts[node]) for node in in_order), Tensor.add_, num_lanes=self.lanes)
        gathered = torch.empty(padded, dtype=packing.dtype, device=packing.device)
        dist.all_gather(list(gathered.view(ranks, slice_size).unbind()), total.contiguous())
        return gathered[: packing.numel]


def _add_each(totals: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Add the vectors of one sum to those of another, in place."""
    return [total.add_(other) for total, other in zip(totals, others, strict=True)]


def _below(
    node: LaneNode, leaves: Iterator[tuple[LaneNode, list[Tensor]]], num_lanes: int, num_shards: int
) -> Iterator[tuple[LaneNode, list[Tensor]]]:
    """Yield the leaves below a node from the stream of all leaves."""
    count = sum(lane < num_shards for lane in node.lanes(num_lanes))
    for _ in range(count):
        yield next(leaves)


def _tree_position(lane: int, num_lanes: int) -> int:
    """Return the position of a lane among the leaves of the tree, from left to right: its bits reversed."""
    bits = num_lanes.bit_length() - 1
    return int(format(lane, f"0{bits}b")[::-1], 2) if bits else 0


def _empty(packing: FlatBuffer) -> Tensor:
    return torch.empty(0, dtype=packing.dtype, device=packing.device)


def _all_to_all(received: list[Tensor], sent: list[Tensor], rank: int) -> None:
    """Exchange tensors by pairwise sends, as NCCL does: gloo has no all_to_all of lists."""
    received[rank].copy_(sent[rank].view_as(received[rank]))
    others = [peer for peer in range(len(sent)) if peer != rank]
    exchange([(peer, sent[peer]) for peer in others], [(peer, received[peer]) for peer in others])
