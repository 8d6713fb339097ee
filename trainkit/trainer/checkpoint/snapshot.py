"""Copies of tensors on the host, in reused buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Snapshot:
    """The latest copies by name; they take the memory of one checkpoint, and a second one allocates nothing."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to the host; waits for the device once, after all copies have been started."""
        self.buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.buffers[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(self.buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
