"""The backend's all-reduce (NCCL, gloo), overlapping with backward; fastest, in no fixed order of summation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.compression import Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of the packing's tensors that is exchanged at once."""

    first: int
    """The index of its first tensor."""
    last: int
    """The index after its last tensor."""
    is_tail: bool = False
    """Whether it contains no gradients, but buffers and the counted weight."""


def cut_into_buckets(packing: FlatBuffer, *, bucket_bytes: int, part_tail: bool) -> tuple[Bucket, ...]:
    """Return the buckets of a packing, in the order in which they are exchanged.

    Gradients become final in about the reverse order of the parameters, and buckets follow that order. All but the last
    have at least `bucket_bytes`.

    Args:
        packing: gradients first, then buffers and the counted weight.
        bucket_bytes: size from which a bucket is full; 0: one bucket.
        part_tail: whether buffers and weight must form a separate bucket; else they join the gradients if those are one
            bucket, which saves an exchange.

    Example:
        >>> import torch
        >>> packing = FlatBuffer([torch.Size([2])] * 4, torch.float32, torch.device("cpu"), num_grads=3)
        >>> buckets = cut_into_buckets(packing, bucket_bytes=16, part_tail=False)
        >>> [(one.first, one.last, one.is_tail) for one in buckets]
        [(1, 3, False), (0, 1, False), (3, 4, True)]
    """
    count, num_grads = len(packing.shapes), packing.num_grads
    end = num_grads
    buckets: list[Bucket] = []
    for place in reversed(range(num_grads)):
        size = (packing.offsets[end] - packing.offsets[place]) * packing.dtype.itemsize
        if place == 0 or (bucket_bytes and size >= bucket_bytes):
            buckets.append(Bucket(first=place, last=end))
            end = place
    if count == num_grads:
        return tuple(buckets)
    if len(buckets) == 1 and not part_tail:
        return (Bucket(first=0, last=count),)
    return (*buckets, Bucket(first=num_grads, last=count, is_tail=True))


class BackendReducer(Reducer):
    """Sums over a process group, always with SUM: converting an average back to a sum would lose bits.

    Gradients lie in one vector, cut into buckets. In the last backward pass of a step a bucket is exchanged as soon as
    it is full and those before it have been started: the same order on every rank. A rank without a shard sends zeros.

    Args:
        bucket_mb: MiB from which a bucket is full; 0: one exchange after backward.
        compressor: exchanges gradients in fewer bytes, and less exactly.
        group: the ranks to sum over; None: all of them.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 25.0,
        compressor: Compressor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._group = group
        self.compressor = compressor
        self._packing: FlatBuffer | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._hooks: list[Any] = []
        self._missing: list[set[int]] = []
        self._waits: list[Callable[[], Any]] = []
        self._armed: Sequence[Tensor] | None = None
        self._reducing = False

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums over all ranks."""
        if self._packing is not packing:
            self._lay_out(packing)
        self._waits.clear()
        self._reducing = True
        sums: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, sums in partials:  # noqa: B007 - at most one; computing it runs backward, which launches buckets
            pass
        self._armed, self._reducing = None, False
        for bucket in self._buckets[len(self._waits) :]:
            packing.fill(self._views[bucket.first : bucket.last], sums[bucket.first : bucket.last])
            self._launch(bucket)
        for wait in self._waits:
            wait()
        return self._views

    def _lay_out(self, packing: FlatBuffer) -> None:
        self._packing, self._flat = packing, packing.empty()
        self._views = packing.views(self._flat)
        bucket_bytes = self._bucket_bytes
        if self.compressor is not None and not self.compressor.takes_buckets:
            bucket_bytes = 0
        self._buckets = cut_into_buckets(
            packing,
            bucket_bytes=bucket_bytes,
            part_tail=self.compressor is not None,
        )
        self._bucket_of = [0] * packing.num_grads
        for number, bucket in enumerate(self._buckets):
            if not bucket.is_tail:
                self._bucket_of[bucket.first : bucket.last] = [number] * (bucket.last - bucket.first)

    def arm(self, params: Sequence[Tensor]) -> None:
        """Exchange buckets during the next backward pass."""
        if not self._reducing or sum(not bucket.is_tail for bucket in self._buckets) < 2:
            return  # another reducer has this step, or the only bucket is full when backward has ended
        if not self._hooks:
            self._hooks = [
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, place))  # type: ignore[no-untyped-call]
                for place, param in enumerate(params)
            ]
        self._missing = [set(range(bucket.first, bucket.last)) for bucket in self._buckets if not bucket.is_tail]
        self._armed = params

    def _on_gradient(self, place: int, _: Tensor) -> None:
        """Record that a gradient of the last backward pass is final."""
        if self._armed is None:
            return  # an earlier shard
        missing = self._missing[self._bucket_of[place]]
        if place not in missing:
            raise TrainingError(
                "a parameter got its gradient in two parts of one backward pass, as reentrant activation checkpointing "
                "does. Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0."
            )
        missing.discard(place)
        while len(self._waits) < len(self._missing) and not self._missing[len(self._waits)]:
            self._launch_full(self._buckets[len(self._waits)])

    @torch.no_grad()
    def _launch_full(self, bucket: Bucket) -> None:
        assert self._armed is not None
        assert self._packing is not None
        grads = [param.grad for param in self._armed[bucket.first : bucket.last]]
        self._packing.fill(self._views[bucket.first : bucket.last], grads)
        self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        assert self._packing is not None
        offsets = self._packing.offsets
        part = self._flat[offsets[bucket.first] : offsets[bucket.last]]
        if self.compressor is None or bucket.is_tail:
            work = dist.all_reduce(part, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            assert work is not None
            self._waits.append(work.wait)
        else:
            grads = self._views[bucket.first : bucket.last]
            self._waits.append(self.compressor.sum(part, grads, index=len(self._waits)))

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
