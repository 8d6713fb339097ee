"""Copies of batches to a CUDA device through a ring of page-locked buffers, on a stream of their own.

A copy from ordinary memory waits for the kernels that are queued on the device, and so does a copy on the stream of the
kernels. From a page-locked buffer on another stream, the batch of a step is copied while the device still computes the
previous step; the host runs ahead of the device unless a step synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.data.reading.collate import tensors_in, to_device

_ALIGNMENT: Final = 512
"""Each tensor in a buffer starts at a multiple of this number of bytes, as torch's own allocations on CUDA do."""
_DEPTH: Final = 3
"""Buffers of a ring: the host fills one while another is copied, and the third waits on the device for its step."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies of this process to a device.

    torch keeps freed memory for the stream that allocated it, and gives out 32 streams of a priority in turn: with a
    stream for each evaluation, the device would hold the batches of 32. With the priority of the streams of saves, one
    of them would be this stream, and batches would wait for the save.

    Source: c10/cuda/CUDAStream.h, "Stream pool note".
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class CopyStream:
    """The stream of a CUDA device for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream_of(device)

    def buffer(self, size: int) -> Tensor:
        """Return (size,) uint8 page-locked memory of the host."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is page-locked already."""
        return tensor.is_pinned()

    def copy(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Begin a copy to the device; return the tensor there, and the event of its end."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = host.to(self._device, non_blocking=True)
            event.record(self._stream)
        return moved, event

    def join(self, moved: Sequence[Tensor], event: torch.cuda.Event) -> None:
        """Let the stream of the kernels wait for an event; the memory of the tensors is kept until it has used them."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in moved:
            tensor.record_stream(current)


def mover_to(device: torch.device, *, pins: bool) -> Callable[[Any], Any]:
    """Return the function that moves batches to a device: to CUDA through a ring of page-locked buffers, if wanted.

    Example:
        >>> batch = torch.ones(2)
        >>> mover_to(torch.device("cpu"), pins=True)(batch) is batch
        True
    """
    if device.type == "cuda" and pins:
        return PinnedRing(CopyStream(device), device).move
    return partial(to_device, device=device)


@dataclass(kw_only=True)
class _Slot:
    """A page-locked buffer, and the end of the last copy from it."""

    buffer: Tensor
    copied: torch.cuda.Event | None = None


class PinnedRing:
    """Moves the tensors of a step's batches to the device: one copy, whatever their number and structure.

    A buffer is filled again only after the copy from it has ended. Tensors that are already page-locked (those of
    worker processes) are copied directly. Tensors that are more than their bytes (sparse, nested, of another class,
    with a gradient) are copied as torch does it.

    Args:
        copies: the copy stream of the device.
        device: the target device of the batches.
        depth: number of buffers.
    """

    def __init__(self, copies: CopyStream, device: torch.device, *, depth: int = _DEPTH) -> None:
        self._copies, self._device = copies, device
        self._slots = [_Slot(buffer=copies.buffer(0)) for _ in range(depth)]
        self._turn = 0

    def move(self, batch: Any) -> Any:
        """Return the batch, of any structure, on the device."""
        joint = [one for one in tensors_in(batch) if _is_plain(one) and not self._copies.is_pinned(one)]
        moved = dict(zip(map(id, joint), self._moved(joint), strict=True))

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) in moved:
                return moved[id(tensor)]
            if not _is_plain(tensor):
                return tensor.to(self._device, non_blocking=True)
            found, event = self._copies.copy(tensor)  # it is page-locked
            self._copies.join([found], event)
            return found

        return to_device(batch, self._device, move)

    def _moved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pack tensors into the next buffer, copy it, and return views of the tensors in the copy."""
        if not tensors:
            return []
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.copied is not None:
            slot.copied.synchronize()
        if slot.buffer.numel() < end:
            slot.buffer = self._copies.buffer(end)
        for tensor, start in zip(tensors, starts, strict=True):
            _view(slot.buffer, start, tensor).copy_(tensor)
        moved, slot.copied = self._copies.copy(slot.buffer[:end])
        self._copies.join([moved], slot.copied)
        return [_view(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one of the host that its bytes, dtype and shape describe."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and is_dense and tensor.device.type == "cpu" and not tensor.requires_grad


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of a buffer of bytes as a contiguous tensor with the dtype and shape of another."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
