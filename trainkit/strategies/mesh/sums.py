"""The reproducible order of summation where parameters are sharded: gradients of a unit are summed lane by lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.numerics.batch import LaneNode, LaneSums, lane_order, sum_of_ranks


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and backward pass in which all data ranks take part."""

    shard: int | None
    """The shard of this rank; None: it repeats one, with weight 0."""
    ends: bool
    """Whether it is the last pass of the step."""
    ends_lane: bool
    """Whether it is the last one over the lanes of `lanes`; without lanes, `ends`."""
    lanes: tuple[int | None, ...]
    """The lane of each data rank, None for a rank without one; without lanes, its first shard."""
    num_shards: int
    """Number of shards of the step."""


def passes_of(num_shards: int, *, rank: int, num_ranks: int, lanes: int | None) -> Iterator[Pass]:
    """Yield the passes of a data rank in a step: as many as the other ranks have.

    With lanes, a round of passes is over one lane of each rank, and its longest lane decides how many passes it has.

    Example:
        >>> [one.shard for one in passes_of(5, rank=1, num_ranks=2, lanes=None)]
        [1, 3, None]
        >>> [(one.shard, one.lanes) for one in passes_of(5, rank=1, num_ranks=2, lanes=4)]
        [(1, (0, 1)), (None, (0, 1)), (3, (2, 3))]
    """
    ranks, work = range(num_ranks), list[Sequence[range]]()
    if lanes is None:
        work.append([range(one, num_shards, num_ranks) for one in ranks])
    else:
        own = [[lane for lane in lane_order(lanes) if lane % num_ranks == one and lane < num_shards] for one in ranks]
        for round_ in zip_longest(*own, fillvalue=num_shards):
            work.append([range(lane, num_shards, lanes) for lane in round_])
    for number, shards in enumerate(work, start=1):
        longest = max(map(len, shards))
        for turn in range(longest):
            mine, is_last = shards[rank], turn == longest - 1
            yield Pass(
                shard=mine[turn] if turn < len(mine) else None,
                ends=is_last and number == len(work),
                ends_lane=is_last,
                lanes=tuple(found[0] if found else None for found in shards),
                num_shards=num_shards,
            )


class LaneSummation:
    """Sums the gradients of all units in the order of the lanes (see `numerics.summation`), over `replicate` and
    `shard`.

    Args:
        lanes: number of lanes.
        num_ranks: number of data ranks, which are all ranks of the run.
        copies: the ranks with the same parts; None: this one alone.
    """

    def __init__(self, *, lanes: int, num_ranks: int, copies: dist.ProcessGroup | None) -> None:
        self.lanes, self.num_ranks, self.copies = lanes, num_ranks, copies
        self.now: Pass
        """The pass that computes."""

    def begin(self, one: Pass) -> None:
        """Begin a pass."""
        self.now = one

    def attach(self, units: Sequence[Any], *, is_alone: bool) -> None:
        """Sum the gradients of units; `is_alone`: `shard` has one rank, where FSDP calls no reduce-scatter."""
        for unit in units:
            of_unit = LaneScatter(self)
            unit.set_custom_reduce_scatter(of_unit)
            if is_alone:
                unit.set_all_reduce_hook(lambda flat, of_unit=of_unit: of_unit(flat, flat.clone()))


class LaneScatter:
    """The reduce-scatter of a unit: pieces of gradients travel unsummed, and are added where they arrive.

    Each rank gets a slice of its part of the gradient from all data ranks, adds up those of each rank in the order of
    its lanes, and in the last pass of a step all in the order of the tree; the copies then gather the slices. Until
    then the output is zero, to which FSDP adds: `0 + sum`, so that the sign of zero does not depend on the ranks.
    """

    def __init__(self, of_all: LaneSummation) -> None:
        self._of_all = of_all
        self._lane: Tensor | None = None
        """(data ranks, slice) the sums over the shards of the lanes that are being computed."""
        self._sums: list[LaneSums[Tensor]] = []

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: object, **_more: object) -> None:
        """Exchange the pieces of a pass; collective.

        Args:
            output_tensor: (numel,) this rank's part of the sum.
            input_tensor: (ranks of shard * numel,) the gradient of the pass.
        """
        now, lanes, num_ranks, numel = (
            self._of_all.now,
            self._of_all.lanes,
            self._of_all.num_ranks,
            output_tensor.numel(),
        )
        copies = num_ranks * numel // input_tensor.numel()
        size = -(-numel // copies)
        pieces = nn.functional.pad(input_tensor.view(-1, numel), (0, size * copies - numel))
        sent = pieces.view(-1, copies, size).transpose(0, 1).reshape(num_ranks, size)
        received = torch.empty_like(sent) if num_ranks > 1 else sent
        if num_ranks > 1:
            dist.all_to_all_single(received, sent)
        self._lane = received if self._lane is None else self._lane.add_(received)
        output_tensor.zero_()
        if not now.ends_lane:
            return
        of_lane, self._lane = self._lane, None
        self._sums = self._sums or [
            LaneSums(Tensor.add_, num_lanes=lanes, num_shards=now.num_shards) for _ in range(num_ranks)
        ]
        for sums, lane, part in zip(self._sums, now.lanes, of_lane, strict=True):
            if lane is not None:
                sums.push(LaneNode(lane, lanes), part)
        if not now.ends:
            return
        of_ranks, self._sums = [sums.take() for sums in self._sums], []
        total = sum_of_ranks(Tensor.add_, of_ranks, num_lanes=lanes, num_shards=now.num_shards)
        if copies > 1:
            slices = total.new_empty(copies, size)
            dist.all_gather([*slices.unbind()], total, group=self._of_all.copies)
            total = slices.view(-1)
        output_tensor.add_(total[:numel])
