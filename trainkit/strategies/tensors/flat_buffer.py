"""One flat vector for all tensors of a step's exchange: gradients, buffers, and the counted weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from trainkit.strategies.tensors.layouts import Strides, dense_strides, view_of


class FlatBuffer:
    """The layout of tensors in a flat vector.

    Args:
        num_grads: how many of the tensors are gradients, which come first; None: all.
        strides: the strides of each tensor's view, dense; None: all are contiguous.

    Example:
        >>> packing = FlatBuffer([torch.Size([2]), torch.Size([])], torch.float32, torch.device("cpu"))
        >>> packing.pack([torch.ones(2), None]).tolist()
        [1.0, 1.0, 0.0]
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_grads: int | None = None,
        strides: Sequence[Strides] | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.strides = [None] * len(self.shapes) if strides is None else list(strides)
        self.sizes = [shape.numel() for shape in shapes]
        self.offsets = [0, *accumulate(self.sizes)]
        self.dtype, self.device = dtype, device
        self.num_grads = len(self.shapes) if num_grads is None else num_grads

    @classmethod
    def like(cls, tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """Return the layout for tensors of these shapes and strides."""
        return cls([one.shape for one in tensors], dtype, device, strides=[dense_strides(one) for one in tensors])

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.offsets[-1]

    def on(self, device: torch.device) -> FlatBuffer:
        """Return the same layout on another device."""
        return FlatBuffer(self.shapes, self.dtype, device, num_grads=self.num_grads, strides=self.strides)

    def empty(self) -> Tensor:
        """Return a vector of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def pack(self, tensors: Sequence[Tensor | None], into: Tensor | None = None) -> Tensor:
        """Copy tensors into a vector; None leaves zeros."""
        flat = self.empty() if into is None else into
        self.fill(self.views(flat), tensors)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors inside a vector, each with the strides of its parameter, without a copy."""
        places = zip(self.offsets, self.sizes, self.shapes, self.strides, strict=False)
        return [view_of(flat.narrow(0, start, size), shape, strides) for start, size, shape, strides in places]

    @staticmethod
    def fill(views: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into the views of a vector; None gives zeros."""
        absent = [view for view, tensor in zip(views, tensors, strict=True) if tensor is None]
        if absent:
            torch._foreach_zero_(absent)
            views = [view for view, tensor in zip(views, tensors, strict=True) if tensor is not None]
            tensors = [tensor for tensor in tensors if tensor is not None]
        if tensors:
            torch._foreach_copy_(views, tensors)  # type: ignore[arg-type]
