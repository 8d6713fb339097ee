"""Copies of tensors on the host, in memory that is allocated before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import torch
from torch import Tensor

_PAGE: Final = 4096
"""Bytes of the smallest pages of memory."""


class _Kind(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    pinned: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Kind:
        return cls(tensor.shape, tensor.dtype, tensor.is_cuda)

    def allocated(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=self.pinned)


class Snapshot:
    """The latest copies by name; they take the memory of one checkpoint, and a second one allocates nothing.

    A page of new memory is found and cleared by the system when it is written for the first time, which takes several
    times as long as the copy: `prepare` does so in a thread while the training goes on.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory of later copies in the background; the tensors may change meanwhile."""
        kinds = {name: _Kind.of(tensor) for name, tensor in tensors.items()}
        self._wait()
        self._preparing = threading.Thread(target=self._allocate, args=(kinds,), name="staging", daemon=True)
        self._preparing.start()

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to the host; waits for the device once, after all copies have been started."""
        self._wait()
        self.buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.buffers[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(self.buffers)

    def release(self) -> None:
        """Free the memory."""
        self._wait()
        self.buffers.clear()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer, kind = self.buffers.get(name), _Kind.of(tensor)
        if buffer is not None and (buffer.shape, buffer.dtype) == (kind.shape, kind.dtype):
            return buffer
        return kind.allocated()

    def _allocate(self, kinds: Mapping[str, _Kind]) -> None:
        with suppress(RuntimeError):  # no memory: the save itself will say so
            for name, kind in kinds.items():
                if name not in self.buffers:
                    buffer = kind.allocated()
                    buffer.reshape(-1).view(torch.uint8)[::_PAGE].zero_()  # a byte of each page
                    self.buffers[name] = buffer

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
