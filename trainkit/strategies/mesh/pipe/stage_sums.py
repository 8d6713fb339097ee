"""The sums of a stage's gradients over replicas, which start during its last backward pass of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from trainkit.strategies.reducers.vector import BackendReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

BUCKET_BYTES: int = 25 * 2**20
"""A bucket with this many bytes of gradients is full."""


class StageSums(BackendReducer):
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
        super().__init__(bucket_bytes=BUCKET_BYTES, group=group)
        self.names, self.params = tuple(params), list(params.values())
        like = [masters[name] for name in self.names]
        self._stage_packing = FlatBuffer.like(like, like[0].dtype, like[0].device)
        self._next, self._has_turn = next_stage, False

    def begin_step(self, *, is_first: bool) -> None:
        """Begin a new sum.

        Args:
            is_first: whether no stage of this rank is exchanged before this one.
        """
        self.begin(self._stage_packing, num_shards=0)
        self._has_turn = is_first

    def take_turn(self) -> None:
        """Exchange full buckets from now on, because those of all previous stages have been started."""
        self._has_turn = True
        self.advance()

    def end_backward(self) -> None:
        """Collect gradients that filled no bucket, and after the last pass exchange the remaining ones."""
        self.collect(leaves_new=False)
        if self._is_last:
            self.fill_rest()
            self.full.update(range(len(self.buckets)))
            self.advance()

    def advance(self) -> None:
        """Exchange full buckets whose predecessors, of previous stages too, have been started."""
        if self._has_turn:
            super().advance()
        if len(self.waits) == len(self.buckets) and self._next is not None:
            self._next.take_turn()


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
