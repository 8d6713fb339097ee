"""Copies from a GPU to the host on a stream of their own, beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors, each with the tensor of the same shape and dtype that it is copied to."""


class CopyStream(Protocol):
    """The copies of some tensors of a device; used once."""

    def start(self, pairs: Pairs) -> None:
        """Copy the tensors as they are at this place of the training's stream; returns before that is done."""

    def hold(self) -> None:
        """Let what the training does on the device from now on wait for the copies; the host goes on."""

    def wait(self) -> None:
        """Wait on the host until the copies are complete; from any thread.

        Raises:
            RuntimeError: the device has failed.
        """


def stream_of(device: torch.device) -> CopyStream | None:
    """Return what copies the tensors of a device; None where the host itself copies them."""
    return CudaCopyStream(device) if device.type == "cuda" else None


class CudaCopyStream:
    """Copies on a CUDA stream beside that of the training, which reads the same tensors meanwhile.

    Source: torch's documentation, CUDA semantics, "CUDA streams": a stream that uses tensors of another one waits for
    it, and memory must not be freed while another stream uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sources: list[Tensor] = []
        """Kept until the training waits for the copies: memory of a tensor made for the save would be used anew."""

    def start(self, pairs: Pairs) -> None:
        """Copy the tensors as they are at this place of the training's stream; returns before that is done."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._sources = [source for source, _ in pairs]
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._done.record(stream)

    def hold(self) -> None:
        """Let what the training does on the device from now on wait for the copies; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._sources = []

    def wait(self) -> None:
        """Wait on the host until the copies are complete; from any thread."""
        self._done.synchronize()
