"""The reproducible order of summation: reduction lanes, and the pairwise tree over them.

Shard i belongs to lane i mod L, lane l to replica l mod R. A lane adds its shards in order; lanes combine pairwise at
distance L/2, ..., 2, 1; a lane without shards is skipped. The result does not depend on R, so any number of replicas up
to L computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from trainkit.numerics.batch import lane_order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneNode:
    """A node of the tree: the sum of lanes `first`, `first + stride`, `first + 2 stride`, ..."""

    first: int
    """The lowest lane."""
    stride: int
    """Distance between its lanes; the number of lanes for a leaf, 1 for the root."""

    def lanes(self, num_lanes: int) -> range:
        """Return the lanes below this node."""
        return range(self.first, num_lanes, self.stride)

    def children(self) -> tuple[LaneNode, LaneNode]:
        """Return the two nodes whose sum is this node, the lower lane first."""
        return LaneNode(self.first, self.stride * 2), LaneNode(self.first + self.stride, self.stride * 2)


def owned_nodes(*, rank: int, num_ranks: int, num_lanes: int, num_shards: int) -> tuple[LaneNode, ...]:
    """Return the largest nodes whose occupied lanes all belong to one rank, left to right.

    These are the sums that a rank computes before anything is exchanged: one node on 1, 2 and 4 ranks of 8 lanes, its
    single lanes on 3.

    Args:
        rank: the data rank.
        num_ranks: number of data ranks.
        num_lanes: number of lanes, a power of two.
        num_shards: number of shards of the step; lanes from this number on are empty.

    Example:
        >>> owned_nodes(rank=1, num_ranks=2, num_lanes=8, num_shards=8)
        (LaneNode(first=1, stride=2),)
    """
    occupied = min(num_lanes, num_shards)

    def visit(node: LaneNode) -> Iterator[LaneNode]:
        lanes = [lane for lane in node.lanes(num_lanes) if lane < occupied]
        owners = {lane % num_ranks for lane in lanes}
        if rank not in owners:
            return
        if len(owners) == 1:
            yield node
            return
        for child in node.children():
            yield from visit(child)

    return tuple(visit(LaneNode(0, 1)))


class LaneSums(Generic[T]):
    """Adds partial sums up the tree: two as soon as both exist, so that at most one per level of the tree is held.

    Args:
        add: returns the sum of two, the left one first; may work in place on its first argument.
        num_lanes: number of lanes, a power of two.
        num_shards: number of shards of the step; lanes from this number on are empty.

    Example:
        >>> sums = LaneSums(lambda left, right: f"({left}+{right})", num_lanes=4, num_shards=4)
        >>> for lane in (0, 2, 1, 3):
        ...     sums.push(LaneNode(lane, 4), str(lane))
        >>> sums.take()
        ['((0+2)+(1+3))']
    """

    def __init__(self, add: Callable[[T, T], T], *, num_lanes: int, num_shards: int) -> None:
        self._add, self._occupied = add, min(num_lanes, num_shards)
        self._held: list[tuple[LaneNode, T]] = []

    def push(self, node: LaneNode, part: T) -> None:
        """Add the sum of a node; nodes come left to right over the leaves of the tree, without empty ones."""
        while node.stride > 1:
            parent = LaneNode(node.first % (node.stride // 2), node.stride // 2)
            left, right = parent.children()
            if node == right:
                if not self._held or self._held[-1][0] != left:
                    break  # the left sibling is on another rank
                part = self._add(self._held.pop()[1], part)
            elif right.first < self._occupied:
                break  # the right sibling follows, or is on another rank
            node = parent
        self._held.append((node, part))

    def take(self) -> list[T]:
        """Return the sums of the largest nodes that are complete, left to right: one if all lanes were pushed."""
        held, self._held = self._held, []
        return [part for _, part in held]


def sum_of_ranks(add: Callable[[T, T], T], of_ranks: Sequence[Sequence[T]], *, num_lanes: int, num_shards: int) -> T:
    """Return the sum over all lanes of the sums that each rank has for its `owned_nodes`, in the order of the tree.

    Example:
        >>> sum_of_ranks(lambda left, right: f"({left}+{right})", [["(0+2)"], ["1"]], num_lanes=4, num_shards=3)
        '((0+2)+1)'
    """
    count, order = len(of_ranks), list(lane_order(num_lanes))
    owned = (owned_nodes(rank=r, num_ranks=count, num_lanes=num_lanes, num_shards=num_shards) for r in range(count))
    parts = dict(zip(chain.from_iterable(owned), chain.from_iterable(of_ranks), strict=True))
    tree = LaneSums(add, num_lanes=num_lanes, num_shards=num_shards)
    for node in sorted(parts, key=lambda node: order.index(node.first)):
        tree.push(node, parts[node])
    (total,) = tree.take()
    return total
