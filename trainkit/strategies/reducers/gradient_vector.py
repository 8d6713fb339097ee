"""The flat vector that holds the gradients of a step, its buckets, and the base of the reducers that sum it whole.

The gradients are views of the exchanged vector, so no second copy of them is alive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.tensors.layouts import FlatBuffer

_BUCKET_BYTES: Final = 25 * 2**20
"""Bytes of gradients that a `FlatReducer` copies into the vector together."""


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


class FlatReducer(Reducer):
    """Sums the vector that holds the gradients of a step over the ranks, in one exchange; subclasses implement
    `sum`.
    """

    _vector: GradientVector | None = None
    _reducing: bool = False

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:  # noqa: ARG002
        """Return the sums over all ranks. A rank without shards adds zeros."""
        vector = self._vector
        if vector is None:
            buckets = cut_into_buckets(packing, bucket_bytes=_BUCKET_BYTES, part_tail=True)
            vector = self._vector = GradientVector(packing, self.allocate(packing), buckets)
        vector.begin_step()
        self._reducing = True
        sums: Sequence[Tensor | None] = [None] * len(packing.shapes)
        for _, sums in partials:  # noqa: B007 - without lanes there is at most one
            pass
        self._reducing = False
        vector.fill_rest(sums)
        note_exchange(vector.flat)
        self.sum(vector.flat)
        return vector.views

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass."""
        if self._reducing and self._vector is not None:
            self._vector.begin_backward(params, is_last=is_last)

    def end_backward(self) -> None:
        """Collect gradients that filled no bucket."""
        if self._reducing and self._vector is not None:
            self._vector.end_backward()

    def allocate(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part, (numel,); the same one for all steps, since new memory costs page
        faults.
        """
        return packing.empty()

    @abstractmethod
    def sum(self, flat: Tensor) -> None:
        """Replace every rank's vector by the sum of all, equal bits on all ranks; collective."""

    def close(self) -> None:
        """Remove the hooks from the parameters, and release the vector."""
        if self._vector is not None:
            self._vector.close()
            self._vector = None
