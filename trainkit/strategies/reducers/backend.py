"""The backend's all-reduce (NCCL, gloo) in buckets, overlapping with backward; fastest, without a fixed order of
summation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.compression import Compressor
from trainkit.strategies.reducers.gradient_vector import Bucket, GradientVector, cut_into_buckets
from trainkit.strategies.tensors.layouts import FlatBuffer


class BackendReducer(Reducer):
    """Sums over a process group, always with SUM: converting an average back to a sum would lose bits.

    Gradients lie in one vector, cut into buckets. In the last backward pass of a step a bucket is exchanged as soon as
    it is full and all previous ones have been started: the same order on every rank. A rank without a shard sends
    zeros.

    Args:
        bucket_mb: MiB from which a bucket is full; 0: one exchange after backward.
        compressor: exchanges gradients in fewer bytes, with a loss of precision.
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
        self._vector: GradientVector | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._full: set[int] = set()
        self._waits: list[Callable[[], Any]] = []
        self._reducing = False

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums over all ranks."""
        vector = self._vector
        if vector is None or vector.packing is not packing:
            vector = self._lay_out(packing)
        vector.begin_step()
        self._waits.clear()
        self._reducing = True
        sums: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, sums in partials:  # noqa: B007 - at most one item; computing it runs backward, which starts the buckets
            pass
        self._reducing = False
        vector.fill_rest(sums)
        for bucket in self._buckets[len(self._waits) :]:
            self._launch(vector, bucket)
        for wait in self._waits:
            wait()
        return vector.views

    def _lay_out(self, packing: FlatBuffer) -> GradientVector:
        self.close()
        bucket_bytes = self._bucket_bytes
        if self.compressor is not None and not self.compressor.takes_buckets:
            bucket_bytes = 0
        self._buckets = cut_into_buckets(
            packing,
            bucket_bytes=bucket_bytes,
            part_tail=self.compressor is not None,
        )
        self._vector = GradientVector(packing, packing.empty(), self._buckets)
        return self._vector

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass; exchange buckets during the last one of a step."""
        if not self._reducing or self._vector is None:
            return  # another reducer sums this step
        self._full.clear()
        self._vector.begin_backward(params, self._on_full if is_last else None, is_last=is_last)

    def end_backward(self) -> None:
        """Collect gradients that filled no bucket."""
        if self._reducing and self._vector is not None:
            self._vector.end_backward()

    def _on_full(self, number: int) -> None:
        """Exchange full buckets whose predecessors are full too: the same order on every rank."""
        assert self._vector is not None
        self._full.add(number)
        while len(self._waits) in self._full:
            self._launch(self._vector, self._buckets[len(self._waits)])

    def _launch(self, vector: GradientVector, bucket: Bucket) -> None:
        offsets = vector.packing.offsets
        part = vector.flat[offsets[bucket.first] : offsets[bucket.last]]
        if self.compressor is None or bucket.is_tail:
            work = dist.all_reduce(part, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            assert work is not None
            self._waits.append(work.wait)
        else:
            grads = vector.views[bucket.first : bucket.last]
            self._waits.append(self.compressor.sum(part, grads, index=len(self._waits)))

    def close(self) -> None:
        """Remove the hooks from the parameters, and release the vector."""
        if self._vector is not None:
            self._vector.close()
            self._vector = None
