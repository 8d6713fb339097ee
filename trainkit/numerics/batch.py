"""The order of samples and of sums: epochs, steps, shards, lanes, and the pairwise tree over lanes.

The order of an epoch is a permutation keyed by (seed, epoch), in memory that does not grow with the dataset.

Shard i belongs to lane i mod L, lane l to replica l mod R. A lane adds its shards in order; lanes combine pairwise at
distance L/2, ..., 2, 1; a lane without shards is skipped. The result does not depend on R, so any number of replicas up
to L computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import Problem
from trainkit.numerics.generators import hash64, mix64_array

AT_EQUAL_CUT: Final = "only at an equal batch.micro_size"
"""Part of the note of a run that is the same training on another number of replicas only with equal microbatches."""
CUT_UNKNOWN: Final = "coupling: not probed"
"""Part of the note of a run for which this is unknown. The page of a run searches for these notes."""
_ROUNDS: Final = 6
"""Rounds of the Feistel network of an epoch's permutation; even, so that both halves end with their own widths."""


class Order(Protocol):
    """The sample at each position of each epoch."""

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch, (stop - start,) int64."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The permutation of an epoch: which sample is at which position.

    A Feistel network over the smallest power of two that holds the dataset, applied until the value is in range (cycle
    walking, Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Any range of the order is computed alone:
    resuming in the middle of an epoch of 1e9 samples costs as much as its next batch.

    Example:
        >>> order = SampleOrder(num_samples=5, seed=0)
        >>> sorted(order.indices(0, 0, 5).tolist())
        [0, 1, 2, 3, 4]
    """

    num_samples: int
    """Samples in the dataset."""
    seed: int
    """The run's seed."""
    shuffle: bool = True
    """False: every epoch uses the dataset's own order."""

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch.

        Args:
            epoch: from 0.
            start: first position, from 0.
            stop: one past the last position, at most `num_samples`.

        Returns:
            (stop - start,) int64, indices into the dataset.
        """
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        bits = (self.num_samples - 1).bit_length()
        keys = [hash64(self.seed, epoch, number) for number in range(_ROUNDS)]
        encrypt: Callable[[NDArray[np.int64]], NDArray[np.int64]] = partial(_encrypt, keys=keys, bits=bits)
        if 1 << bits <= 2 * (stop - start):
            encrypt = encrypt(np.arange(1 << bits, dtype=np.int64)).take  # the permutation itself, for repeated use
        values = encrypt(np.arange(start, stop, dtype=np.int64))
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            moved = encrypt(values[outside])
            values[outside] = moved
            outside = outside[moved >= self.num_samples]
        return values


def _encrypt(values: NDArray[np.int64], keys: Sequence[int], bits: int) -> NDArray[np.int64]:
    """Permute [0, 2**bits): a round changes the high bits, then the low bits, which have one more if `bits` is odd."""
    high, low = bits // 2, bits - bits // 2
    left, right = values >> low, values & ((1 << low) - 1)
    for number, key in enumerate(keys):
        mixed = mix64_array(np.uint64(key) ^ right.astype(np.uint64)).astype(np.int64)
        left, right = right, left ^ (mixed & ((1 << (low if number % 2 else high)) - 1))
    return (left << low) | right


@dataclass(frozen=True, slots=True)
class Ticket:
    """The work of a replica: a step, and some of its shards."""

    step: int
    """The update, from 0."""
    shards: tuple[int, ...]
    """The shards to compute here, in order; empty if a short batch has fewer shards than there are replicas."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The two batch sizes that affect the result."""

    global_size: int
    """Samples per step."""
    micro_size: int
    """Samples per shard, at most."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The division of a dataset of `num_samples` into steps and shards.

    A step consists of the next `global_size` positions of the epoch's order; the last step of an epoch consists of the
    rest. A batch of b samples is cut into ceil(b / micro_size) contiguous shards whose sizes differ by at most one.

    Example:
        >>> plan = BatchPlan(num_samples=10, global_size=4, micro_size=3)
        >>> [plan.batch_size(step) for step in range(plan.steps_per_epoch)]
        [4, 4, 2]
        >>> plan.shard_range(1, 0), plan.shard_range(1, 1)
        ((0, 4, 6), (0, 6, 8))
    """

    num_samples: int
    """Samples in the training split."""
    global_size: int
    """Samples per step."""
    micro_size: int
    """Samples per shard, at most."""
    drop_last: bool = False
    """Leave out the last, short batch of every epoch."""

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps of one epoch."""
        if self.drop_last:
            return self.num_samples // self.global_size
        return -(-self.num_samples // self.global_size)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def batch_range(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop): the positions of the epoch's order that a step consists of."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_size
        return epoch, start, min(start + self.global_size, self.num_samples)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step."""
        rest = self.num_samples - step % self.steps_per_epoch * self.global_size  # in the epoch, from this step on
        return rest if rest < self.global_size else self.global_size  # noqa: FURB136 - four times a step

    def num_shards(self, step: int) -> int:
        """Return the number of shards of a step."""
        return -(-self.batch_size(step) // self.micro_size)

    def shard_range(self, step: int, shard: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop): the positions of the epoch's order that a shard consists of."""
        epoch, start, stop = self.batch_range(step)
        size = stop - start
        shards = -(-size // self.micro_size)
        small, larger = divmod(size, shards)
        first = start + shard * small + min(shard, larger)
        return epoch, first, first + small + (1 if shard < larger else 0)

    def shard_size(self, step: int, shard: int) -> int:
        """Return the number of samples of a shard."""
        _, start, stop = self.shard_range(step, shard)
        return stop - start

    def samples_before(self, step: int) -> int:
        """Return the number of samples used by earlier steps."""
        epoch, start, _ = self.batch_range(step)
        per_epoch = self.steps_per_epoch * self.global_size if self.drop_last else self.num_samples
        return epoch * per_epoch + start


def shards_of_rank(num_shards: int, *, rank: int, num_ranks: int, lanes: int | None) -> tuple[int, ...]:
    """Return the shards of a step that one data rank computes, in the order of computation.

    Args:
        num_shards: number of shards of the step.
        rank: the data rank, from 0.
        num_ranks: number of data ranks.
        lanes: number of reduction lanes of the reproducible order of summation; None if the order is free.

    Returns:
        Every `num_ranks`-th shard; with lanes, lane after lane, as `lane_order` visits them.

    Example:
        >>> shards_of_rank(5, rank=1, num_ranks=2, lanes=None)
        (1, 3)
        >>> shards_of_rank(12, rank=0, num_ranks=2, lanes=8)
        (0, 8, 4, 2, 10, 6)
    """
    if lanes is None:
        return tuple(range(rank, num_shards, num_ranks))
    chosen = (lane for lane in lane_order(lanes) if lane % num_ranks == rank)
    return tuple(shard for lane in chosen for shard in range(lane, num_shards, lanes))


def lane_order(lanes: int) -> Iterator[int]:
    """Return the leaves of the pairwise tree from left to right: 0, 4, 2, 6, 1, 5, 3, 7 for 8 lanes.

    In this order a single replica holds at most as many partial sums as the tree is deep.
    """
    bits = (lanes - 1).bit_length()
    return (int(format(leaf, f"0{bits}b")[::-1], 2) if bits else 0 for leaf in range(lanes))


def resolve_batch(
    *,
    global_size: int | None,
    micro_size: int | None,
    accumulation: int | None,
    num_replicas: int,
    lanes: int | None,
    shards_a_replica: int = 1,
) -> BatchSizes | list[Problem]:
    """Compute global and micro batch size from any two of the three values in the config.

    Args:
        global_size: samples per step.
        micro_size: samples per shard, at most.
        accumulation: shards that each replica computes in a full step.
        num_replicas: replicas that get their own shards.
        lanes: number of reduction lanes of the reproducible order of summation; None if the order is free.
        shards_a_replica: number of shards of a step that keep a replica busy: one for a device, more for a
            pipeline; used if the config does not set the cut and the batch is large enough.

    Returns:
        The sizes, or the problems.

    Example:
        >>> resolve_batch(global_size=64, micro_size=None, accumulation=4, num_replicas=2, lanes=None)
        BatchSizes(global_size=64, micro_size=8)
    """
    if global_size is None:
        if micro_size is None or accumulation is None:
            rule = "needs a size. Give batch.global_size, or both batch.micro_size and batch.accumulation."
            return [Problem(key="batch", rule=rule)]
        return BatchSizes(global_size=micro_size * accumulation * num_replicas, micro_size=micro_size)
    key, value = ("batch.global_size", global_size) if micro_size is None else ("batch.micro_size", micro_size)
    if micro_size is None:
        # Without either, the fewest shards that keep a replica busy are the fastest. A reproducible run has one shard
        # per lane, so that the shards, and with them the bits, are the same on any number of replicas.
        fewest = lanes or num_replicas * shards_a_replica
        shards = num_replicas * accumulation if accumulation else max(num_replicas, min(fewest, global_size))
        if shards > global_size:
            rule = f"fewer samples than the {shards} shards of a step on {num_replicas} replicas. Use {shards} or more."
            return [Problem(key=key, value=value, rule=rule)]
        micro_size = -(-global_size // shards)
    if micro_size > global_size:
        rule = f"larger than batch.global_size={global_size}. Use {global_size} or less."
        return [Problem(key=key, value=value, rule=rule)]
    num_shards = -(-global_size // micro_size)
    if num_shards < num_replicas:
        sizes = range(-(-global_size // num_replicas), 0, -1)
        even = next((size for size in sizes if -(-global_size // size) >= num_replicas), 0)
        remedy = f"micro_size={even}, which occupies all." if even else f"global_size={num_replicas} or more."
        cut = f"{num_shards} shard{'' if num_shards == 1 else 's'}"
        rule = f"cuts a step of {global_size} samples into {cut}, fewer than the {num_replicas} replicas. "
        return [Problem(key=key, value=value, rule=f"{rule}Use batch.{remedy}")]
    return BatchSizes(global_size=global_size, micro_size=micro_size)


Request = tuple[int, NDArray[np.int64], list[int], list[int] | None]
"""An epoch, samples of it, the sizes of the shards that they form, and their positions if samples repeat."""

_BLOCK: Final = 1 << 16
"""Number of positions of the order computed at a time: half a megabyte."""


class Positions:
    """Converts tickets to sample indices; the order is computed a block at a time.

    Example:
        >>> plan = BatchPlan(num_samples=10, global_size=4, micro_size=2)
        >>> positions = Positions(plan, SampleOrder(num_samples=10, seed=0, shuffle=False))
        >>> positions.indices(Ticket(1, (0, 1))), positions.sizes(Ticket(1, (0, 1)))
        (array([4, 5, 6, 7]), [2, 2])
    """

    def __init__(self, plan: BatchPlan, order: Order) -> None:
        self.plan = plan
        self.order = order
        self._epoch = -1
        self._start = 0
        self._block: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """The samples at the positions from the block's start on."""

    def indices(self, ticket: Ticket) -> NDArray[np.int64]:
        """Return the samples of the ticket's shards, one shard after the other."""
        plan = self.plan
        epoch, batch_start, batch_stop = plan.batch_range(ticket.step)
        if epoch != self._epoch or batch_start < self._start or batch_stop > self._start + len(self._block):
            last = min(plan.num_samples, max(batch_stop, batch_start + _BLOCK))
            self._block = self.order.indices(epoch, batch_start, last)
            self._epoch, self._start = epoch, batch_start
        if ticket.shards == tuple(range(-(-(batch_stop - batch_start) // plan.micro_size))):  # all, in their order
            return self._block[batch_start - self._start : batch_stop - self._start]
        ranges = [plan.shard_range(ticket.step, shard)[1:] for shard in ticket.shards]
        parts = [self._block[start - self._start : stop - self._start] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def sizes(self, ticket: Ticket) -> list[int]:
        """Return the number of samples of each of the ticket's shards."""
        return [self.plan.shard_size(ticket.step, shard) for shard in ticket.shards]

    def request(self, ticket: Ticket) -> Request:
        """Return the request to a reader for a ticket."""
        indices, positions = self.indices(ticket), None
        sizes = [len(indices)] if len(ticket.shards) == 1 else self.sizes(ticket)
        if not isinstance(self.order, SampleOrder):
            ranges = [self.plan.shard_range(ticket.step, shard)[1:] for shard in ticket.shards]
            positions = [position for start, stop in ranges for position in range(start, stop)]
        return self.plan.epoch(ticket.step), indices, sizes, positions


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
        self._stack: list[tuple[LaneNode, T]] = []

    def push(self, node: LaneNode, part: T) -> None:
        """Add the sum of a node; nodes come left to right over the leaves of the tree, without empty ones."""
        while node.stride > 1:
            parent = LaneNode(node.first % (node.stride // 2), node.stride // 2)
            left, right = parent.children()
            if node == right:
                if not self._stack or self._stack[-1][0] != left:
                    break  # the left sibling is on another rank
                part = self._add(self._stack.pop()[1], part)
            elif right.first < self._occupied:
                break  # the right sibling follows, or is on another rank
            node = parent
        self._stack.append((node, part))

    def take(self) -> list[T]:
        """Return the sums of the largest nodes that are complete, left to right: one if all lanes were pushed."""
        stack, self._stack = self._stack, []
        return [part for _, part in stack]


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
