"""The sums of a stage's gradients over replicas, which start during its last backward pass of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from trainkit.strategies.reducers.gradient_vector import GradientVector, cut_into_buckets
from trainkit.strategies.tensors.layouts import FlatBuffer

BUCKET_BYTES: int = 25 * 2**20
"""A bucket with this many bytes of gradients is full."""


class StageSums:
    """Sums the gradients of one stage over the replicas, in buckets, while this rank and others still compute.

    A bucket is exchanged as soon as the last backward pass of a step has produced its gradients, the others when that
    pass ends. Ranks match exchanges only by their order, and replicas may have different numbers of microbatches, so
    the order is fixed: the buckets of the last stage first. A rank without a microbatch sends zeros.

    Args:
        params: parameters of only this stage, by canonical name; each gets a gradient.
        masters: the parameters that the optimizer updates, whose dtype and strides the sums have.
        group: the ranks with this stage, one of each replica.
        next_stage: the sums of the stage of this rank whose buckets follow; None: no stage follows.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        next_stage: StageSums | None = None,
    ) -> None:
        self.names = tuple(params)
        self._params, self._group = list(params.values()), group
        self._next, self._has_turn = next_stage, False
        like = [masters[name] for name in self.names]
        packing = FlatBuffer.like(like, like[0].dtype, like[0].device)
        self._buckets = cut_into_buckets(packing, bucket_bytes=BUCKET_BYTES, part_tail=False)
        self._vector = GradientVector(packing, packing.empty(), self._buckets)
        self._full: set[int] = set()
        self._waits: list[Callable[[], Any]] = []

    def begin_step(self, *, is_first: bool) -> None:
        """Begin a new sum.

        Args:
            is_first: whether no stage of this rank is exchanged before this one.
        """
        self._vector.begin_step()
        self._full.clear()
        self._waits.clear()
        self._has_turn = is_first

    def take_turn(self) -> None:
        """Exchange full buckets from now on, because those of all previous stages have been started."""
        self._has_turn = True
        self._advance()

    def begin_backward(self, *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass of the stage; exchange buckets during the last one of a
        step.
        """
        self._vector.begin_backward(self._params, self._on_full if is_last else None)

    def end_backward(self, *, is_last: bool) -> None:
        """Collect gradients that filled no bucket, and after the last pass exchange the remaining ones."""
        self._vector.end_backward()
        if is_last:
            self._launch_rest()

    def finish(self) -> Sequence[Tensor]:
        """Wait for the sums of the step, one per name; the next step overwrites them."""
        self._launch_rest()
        for wait in self._waits:
            wait()
        return self._vector.views

    def _on_full(self, number: int) -> None:
        self._full.add(number)
        self._advance()

    def _launch_rest(self) -> None:
        if len(self._waits) == len(self._buckets):
            return
        self._vector.fill_rest([None] * len(self.names))
        self._full.update(range(len(self._buckets)))
        self._advance()

    def _advance(self) -> None:
        """Exchange full buckets whose predecessors have been started."""
        while self._has_turn and len(self._waits) in self._full:
            self._launch()
        if len(self._waits) == len(self._buckets) and self._next is not None:
            self._next.take_turn()

    def _launch(self) -> None:
        """Start the sum of the next bucket."""
        bucket, vector = self._buckets[len(self._waits)], self._vector
        offsets = vector.packing.offsets
        part = vector.flat[offsets[bucket.first] : offsets[bucket.last]]
        work = dist.all_reduce(part, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None
        self._waits.append(work.wait)


def stage_sums_of(
    blocks: Mapping[int, nn.Module],
    params: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
) -> dict[int, StageSums]:
    """Return the sums of each stage of a rank, the last stage first, without parameters shared by two of its stages.

    Args:
        blocks: stage -> its modules.
        params: parameters with gradients that no other rank of the replica holds.
        masters: the parameters that the optimizer updates.
        group: the ranks of the same stages; None with one replica.
    """
    if group is None:
        return {}
    stages: dict[int, list[int]] = {}
    for stage, module in blocks.items():
        for param in module.parameters():
            stages.setdefault(id(param), []).append(stage)
    own = {
        stage: {name: param for name, param in params.items() if stages.get(id(param)) == [stage]} for stage in blocks
    }
    sums: dict[int, StageSums] = {}
    following: StageSums | None = None
    for stage in sorted(own):
        if own[stage]:
            following = StageSums(own[stage], masters, group, next_stage=following)
            sums = {stage: following, **sums}
    return sums
