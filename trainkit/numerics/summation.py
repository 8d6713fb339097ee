"""The reproducible order of summation: reduction lanes, and the pairwise tree over them.

Shard i belongs to lane i mod L, lane l to replica l mod R. A lane adds its shards in order; lanes combine pairwise at
distance L/2, ..., 2, 1; a lane without shards is skipped. The result does not depend on R, so any number of replicas up
to L computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

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


def combine_pairwise(parts: Iterable[tuple[LaneNode, T]], add: Callable[[T, T], T], *, num_lanes: int) -> T:
    """Add partial sums up the tree.

    Args:
        parts: (node, its sum), left to right over the leaves of the tree, without empty lanes. Consumed one at a
            time, so that at most one sum per level of the tree is held.
        add: returns the sum of two, the left one first; may work in place on its first argument.
        num_lanes: number of lanes, a power of two.

    Returns:
        The sum over all lanes.

    Raises:
        ValueError: there are no parts.

    Example:
        >>> leaves = [(LaneNode(lane, 4), str(lane)) for lane in (0, 2, 1, 3)]
        >>> combine_pairwise(leaves, lambda a, b: f"({a}+{b})", num_lanes=4)
        '((0+2)+(1+3))'
    """
    found = _Sums(iter(parts), add, num_lanes).total(LaneNode(0, 1))
    if not found:
        msg = "a step without shards has no sum"
        raise ValueError(msg)
    return found[0]


@dataclass(slots=True)
class _Sums(Generic[T]):
    """The sums of a tree. An object and not a function inside another one, which would refer to itself, so that its
    last sums would stay alive until the next garbage collection.
    """

    stream: Iterator[tuple[LaneNode, T]]
    add: Callable[[T, T], T]
    num_lanes: int
    head: list[tuple[LaneNode, T]] = field(default_factory=list)
    """The next sum of the stream, once it is read."""

    def total(self, node: LaneNode) -> list[T]:
        """Return the sum of a node; nothing if all of its lanes are empty."""
        if not self.head:
            self.head.extend(islice(self.stream, 1))
        if not self.head:
            return []
        upcoming = self.head[0][0]
        if upcoming.first % node.stride != node.first:
            return []
        if upcoming == node:
            return [self.head.pop()[1]]
        if node.stride >= self.num_lanes:
            return []
        left, right = node.children()
        sums = [*self.total(left), *self.total(right)]
        return [self.add(sums[0], sums[1])] if len(sums) == 2 else sums
