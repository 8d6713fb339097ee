"""The backend's all-reduce (NCCL, gloo) in buckets, overlapping with backward; fastest, without a fixed order of
summation.

The gradients of a step are views of the exchanged vector, so no second copy of them is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.compression import Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of the packing's tensors that is exchanged together."""

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


def largest_bucket(model: nn.Module, dtype: torch.dtype, bucket_bytes: float) -> int:
    """Return the elements of the largest bucket of a model's gradients.

    Example:
        >>> largest_bucket(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.float32, 16)
        16
    """
    shapes = [param.shape for param in model.parameters() if param.requires_grad]
    packing = FlatBuffer(shapes, dtype, torch.device("cpu"))
    buckets = cut_into_buckets(packing, bucket_bytes=int(bucket_bytes), part_tail=True)
    return max((packing.offsets[one.last] - packing.offsets[one.first] for one in buckets), default=0)


class GradientVector:
    """The flat vector of a step's exchange, which holds the gradients starting with the backward passes.

    Backward allocates separate memory for each gradient. When the last gradient of a bucket exists, all of them are
    copied into the vector in one operation and their memory is freed: only the vector and one bucket are alive, instead
    of all gradients twice. The copy becomes `param.grad`, to which autograd adds those of later shards. Gradients in
    another dtype than the vector's are added to it here instead, and `param.grad` is None.

    Args:
        packing: shapes, strides and dtype; gradients first.
        flat: (packing.numel,), overwritten by every step.
        buckets: the gradients that are copied together.
    """

    def __init__(self, packing: FlatBuffer, flat: Tensor, buckets: Sequence[Bucket]) -> None:
        self.packing, self.flat, self.views = packing, flat, packing.views(flat)
        self._ranges = [(one.first, min(one.last, packing.num_grads)) for one in buckets if not one.is_tail]
        self._bucket_of = [0] * packing.num_grads
        for number, (first, last) in enumerate(self._ranges):
            self._bucket_of[first:last] = [number] * (last - first)
        self._hooks: list[Any] = []
        self._missing: list[set[int]] = []
        self._params: Sequence[Tensor] | None = None
        self._on_full: Callable[[int], None] | None = None
        self._held: list[bool] = []
        self._is_last = False

    def begin_step(self) -> None:
        """Start a new sum: the content of the vector belongs to an earlier step."""
        self._held, self._params = [False] * len(self.packing.shapes), None

    def begin_backward(
        self, params: Sequence[Tensor], on_full: Callable[[int], None] | None = None, *, is_last: bool = False
    ) -> None:
        """Collect the gradients of the next backward pass.

        Args:
            params: the parameters of the packing's gradients, the same in every pass.
            on_full: called with the number of a bucket when the vector holds all of its final gradients. None: more
                passes follow, or nothing is exchanged during backward.
            is_last: whether no pass of the step follows.
        """
        if len(self._ranges) > 1:
            if not self._hooks:
                self._hooks = [
                    param.register_post_accumulate_grad_hook(partial(self._on_gradient, place))  # type: ignore[no-untyped-call]
                    for place, param in enumerate(params)
                ]
            self._missing = [set(range(first, last)) for first, last in self._ranges]
        self._params, self._on_full, self._is_last = params, on_full, is_last

    def end_backward(self) -> None:
        """Collect the gradients of buckets that did not become full: of the only bucket, or of those with unused
        parameters.

        After the last pass, new gradients stay in their memory: `fill_rest` copies them together with the buffers.
        """
        for first, last in self._ranges:
            self._take(first, last, leaves_new=self._is_last)
        self._params = self._on_full = None

    def fill_rest(self, sums: Sequence[Tensor | None]) -> None:
        """Copy the remaining tensors into the vector: buffers, the counted weight, and missing gradients; None gives
        zeros.

        Args:
            sums: one per tensor of the packing; those of gradients in the vector are ignored.
        """
        rest = [place for place, held in enumerate(self._held) if not held]
        self.packing.fill([self.views[place] for place in rest], [sums[place] for place in rest])

    def _on_gradient(self, place: int, _: Tensor) -> None:
        """Record that a backward pass has computed a gradient."""
        if self._params is None:
            return  # another pass over the same model
        number = self._bucket_of[place]
        missing = self._missing[number]
        if place not in missing:
            if self._on_full is None:
                return  # `end_backward` collects the other part
            raise TrainingError(
                "a parameter got its gradient in two parts of one backward pass, as reentrant activation checkpointing "
                "does. Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0."
            )
        missing.discard(place)
        if not missing:
            self._take(*self._ranges[number])
            if self._on_full is not None:
                self._on_full(number)

    @torch.no_grad()
    def _take(self, first: int, last: int, *, leaves_new: bool = False) -> None:
        """Copy the gradients of a bucket into the vector, or add them to it, and free their own memory."""
        assert self._params is not None
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for place in range(first, last):
            param, view = self._params[place], self.views[place]
            grad = param.grad
            if grad is None or grad is view:
                continue
            is_cast = grad.dtype is not view.dtype
            if leaves_new and not is_cast and not self._held[place]:
                continue
            param.grad = None if is_cast else view
            if is_cast and self._held[place]:
                view.add_(grad)
                continue
            views.append(view)
            grads.append(grad)
            self._held[place] = True
        if grads:
            torch._foreach_copy_(views, grads)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


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
