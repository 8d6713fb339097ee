"""Move many tensors between devices as one vector of bytes: one transfer for any number, dtypes and strides.

Each transfer costs a call of the driver, and one from or to ordinary memory of the host goes through a small buffer of
the driver piece by piece, while the host waits. Here tensors are laid into a vector where they are, the vector travels,
and where it arrives its parts are the tensors. On the host it is page-locked. torch keeps page-locked memory that is no
longer used for later vectors, but not before a copy from it has ended, so that no step has to wait for that of the step
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from trainkit.strategies.tensors.layouts import Strides, dense_strides, view_of

_ALIGNMENT: Final = 64
"""Alignment of each tensor in bytes: it allows a view of every dtype, and vector instructions of kernels."""


class TensorKind(NamedTuple):
    """Description of a tensor without its data."""

    shape: torch.Size
    dtype: torch.dtype
    strides: Strides = None
    """Strides of a dense tensor; None: contiguous."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """Return the kind of a tensor."""
        return cls(tensor.shape, tensor.dtype, dense_strides(tensor))

    @property
    def nbytes(self) -> int:
        """Number of bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize


class ByteLayout:
    """The positions of tensors in a vector of bytes.

    Example:
        >>> layout = ByteLayout([TensorKind(torch.Size([3]), torch.bfloat16), TensorKind(torch.Size([]), torch.int64)])
        >>> layout.size, [view.dtype for view in layout.views(torch.zeros(128, dtype=torch.uint8))]
        (128, [torch.bfloat16, torch.int64])
    """

    def __init__(self, kinds: Sequence[TensorKind]) -> None:
        self._kinds = list(kinds)
        self._starts = [0, *accumulate(-(-kind.nbytes // _ALIGNMENT) * _ALIGNMENT for kind in kinds)]

    @property
    def size(self) -> int:
        """Number of bytes of the vector."""
        return self._starts[-1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors inside of a vector, without a copy."""
        places = zip(self._starts, self._kinds, strict=False)
        return [
            view_of(flat.narrow(0, start, kind.nbytes).view(kind.dtype), kind.shape, kind.strides)
            for start, kind in places
        ]


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Return (size,) uint8 memory of the host for a transfer from or to a device; page-locked if CUDA copies it."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Parcel:
    """Tensors of one device, packed into a vector for the transfer to other devices.

    Args:
        tensors: strided, one at least.
        towards: one of the devices that they travel to.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], *, towards: torch.device) -> None:
        self._layout = ByteLayout([TensorKind.of(tensor) for tensor in tensors])
        device, size = tensors[0].device, self._layout.size
        on_host = device.type == "cpu"
        self._flat = host_bytes(size, towards) if on_host else torch.empty(size, dtype=torch.uint8, device=device)
        torch._foreach_copy_(self._layout.views(self._flat), list(tensors))

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the tensors on another device; a transfer to the host is complete on return."""
        if device.type == "cpu":
            flat = host_bytes(self._layout.size, self._flat.device)
            flat.copy_(self._flat)
        else:
            flat = self._flat.to(device, non_blocking=True)
        return self._layout.views(flat)


def moved(tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Return tensors on a device: those of another device after one transfer, all others unchanged.

    Args:
        tensors: strided or sparse; None stays None.
        device: the target device.

    Example:
        >>> tensors = moved([torch.ones(2, 3), None, torch.eye(3).to_sparse()], torch.device("meta"))
        >>> [tensor if tensor is None else (tensor.device.type, tensor.is_sparse) for tensor in tensors]
        [('meta', False), None, ('meta', True)]
    """
    away = [tensor for tensor in tensors if tensor is not None and tensor.device != device]
    if not away:
        return list(tensors)
    arrived = iter(Parcel([part for tensor in away for part in strided_parts(tensor)], towards=device).on(device))
    return [tensor if tensor is None or tensor.device == device else assembled(tensor, arrived) for tensor in tensors]


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return a tensor itself, or indices and values of a sparse one."""
    if not tensor.is_sparse:
        return [tensor.detach()]
    return [tensor._indices(), tensor._values().detach()]  # noqa: SLF001 - the public ones refuse duplicate indices


def assembled(like: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """Return the tensor that consists of the next parts; `like` is the original tensor."""
    if not like.is_sparse:
        return next(parts)
    indices, values = next(parts), next(parts)
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
    )
