"""One flat vector for all that a step exchanges: gradients, buffers, and the counted weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Packing"]


class Packing:
    """Where each tensor lies in the flat vector.

    Args:
        shapes: the shapes of the tensors, in order.
        dtype: dtype of the vector.
        device: where it lives.

    Example:
        >>> packing = Packing([torch.Size([2]), torch.Size([])], torch.float32, torch.device("cpu"))
        >>> packing.pack([torch.ones(2), None]).tolist()
        [1.0, 1.0, 0.0]
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = list(shapes)
        self.sizes = [shape.numel() for shape in shapes]
        self.offsets = [0, *accumulate(self.sizes)]
        self.dtype, self.device = dtype, device

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.offsets[-1]

    def empty(self) -> Tensor:
        """A vector of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def pack(self, tensors: Sequence[Tensor | None], into: Tensor | None = None) -> Tensor:
        """Copy tensors into a vector; None leaves zeros."""
        flat = self.empty() if into is None else into
        views = self.views(flat)
        pairs = [(view, tensor) for view, tensor in zip(views, tensors, strict=True) if tensor is not None]
        if into is not None and len(pairs) < len(views):
            flat.zero_()
        torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs])
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside a vector, without a copy."""
        starts = self.offsets[:-1]
        return [
            flat.narrow(0, start, size).view(shape)
            for start, size, shape in zip(starts, self.sizes, self.shapes, strict=True)
        ]
