"""The buffers of a model of one device and dtype, read and written as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BufferGroup:
    """Buffers of one device and dtype, and their values at the start of a step.

    An operation on all of them is one launch, however many there are.

    Args:
        places: of the buffers, among all that a forward pass updates.
        tensors: their values at the start of a step; copied.

    Example:
        >>> group = BufferGroup([0, 2], [torch.ones(2), torch.zeros(())])
        >>> group.start.tolist(), [tuple(tensor.shape) for tensor in group.starts]
        ([1.0, 1.0, 0.0], [(2,), ()])
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor]) -> None:
        self.places = places
        self.start = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        """(elements,) the values at the start of the step."""
        parts = self.start.split_with_sizes([tensor.numel() for tensor in tensors])
        self.starts = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        """The same, a tensor a buffer: views."""

    def begin_step(self, tensors: Sequence[Tensor]) -> None:
        """Store the values of the buffers."""
        torch._foreach_copy_(self.starts, list(tensors))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors inside of a vector, without a copy."""
        unflatten = torch._utils._unflatten_dense_tensors  # noqa: SLF001 - as DDP does
        views: tuple[Tensor, ...] = unflatten(flat, self.starts)  # type: ignore[no-untyped-call]
        return list(views)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors of one dtype, one a buffer, as one vector: a copy."""
        flat = tensors[0].new_empty(self.start.numel())
        torch._foreach_copy_(self.views(flat), list(tensors))
        return flat

    def advanced(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (elements,) the values of the buffers; of integers (counters) what they have advanced by.

        Shares of an advance add up to the advance, as shares of a value add up to a value.
        """
        flat = self.joined(tensors)
        return flat if flat.is_floating_point() else flat.sub_(self.start)

    def write(self, tensors: Sequence[Tensor], totals: Sequence[Tensor | None]) -> None:
        """Set buffers to sums over all shards and ranks; None leaves a buffer as it is."""
        found = [(tensor, total) for tensor, total in zip(tensors, totals, strict=True) if total is not None]
        if not found:
            return
        values = [total for _, total in found]
        if not self.start.is_floating_point():
            starts = [start for start, total in zip(self.starts, totals, strict=True) if total is not None]
            group = BufferGroup([], starts)
            values = group.views(group.start + group.joined(values).round_().to(group.start.dtype))
        torch._foreach_copy_([tensor for tensor, _ in found], values)
