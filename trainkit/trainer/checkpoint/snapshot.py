"""Copy tensors to the host, into memory that was allocated before; those of a GPU during the training."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal

import torch
from torch import Tensor

_PAGE: Final = 4096
"""Bytes of the smallest pages of memory."""
_ALIGNMENT: Final = 64
"""Bytes to which tensors are aligned in a block of page-locked memory."""
_BLOCK: Final = 1 << 30
"""Bytes of a block of page-locked memory, if that is enough for eight tensors."""
Part = Literal["model", "optimizer", "other"]
"""A part of the state: parameters and buffers, the state of the optimizer, or the state of callbacks."""
_CHANGED_BY: Final[Mapping[str, tuple[Part, ...]]] = {"data": (), "forward": ("model",), "backward": ("model",)}
"""Phase -> the parts that it may change: some models change their own parameters in a forward pass, and an optimizer's
state changes in updates alone (docs/decisions/0051). Any other phase may change all of them.
"""
_PART_OF: Final[Mapping[str, Part]] = {"param": "model", "buffer": "model", "optimizer": "optimizer"}
"""First word of a tensor's name in a checkpoint -> its part."""
_ALL: Final[tuple[Part, ...]] = ("other", "model", "optimizer")
"""In the order in which the training waits for them: all copies of a device are on one stream."""

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors, each with the tensor of the same shape and dtype that it is copied to."""


@functools.cache
def _stream_beside_training(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies of a device: torch keeps the temporary memory of a copy, as of a tensor with the
    channels last, for each stream that has used some.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CopyStream:
    """Copies the tensors of a GPU on a separate stream, while the training reads them; each instance is used once.

    Source: torch's documentation, CUDA semantics, "CUDA streams": a stream that uses tensors of another one waits for
    it, and memory must not be freed while another stream uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sources: list[Tensor] = []
        """Kept until the training waits for the copies: otherwise memory of a tensor made for the save would be
        reused.
        """

    def start(self, pairs: Pairs) -> None:
        """Copy the tensors in their state at this position of the training's stream; returns before the copies are
        complete.
        """
        stream = _stream_beside_training(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._sources = [source for source, _ in pairs]
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._done.record(stream)

    def hold(self) -> None:
        """Let later operations of the training on the device wait for the copies; the host continues."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._sources = []

    def wait(self) -> None:
        """Wait on the host until the copies are complete; from any thread.

        Raises:
            RuntimeError: the device has failed.
        """
        with torch.cuda.device(self._device):  # otherwise a new thread creates a context on the first GPU: 0.5 GiB
            self._done.synchronize()


def stream_of(device: torch.device) -> CopyStream | None:
    """Return a stream that copies the tensors of a device; None if the host itself copies them."""
    return CopyStream(device) if device.type == "cuda" else None


def _allocated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate the buffers of tensors; those of GPUs are in page-locked memory.

    Raises:
        MemoryError: the host has too little, which CUDA calls "out of memory", as that of a device.
    """
    pinned = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cuda" and tensor.numel()}
    host = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items() if name not in pinned}
    for device in {tensor.device for tensor in pinned.values()}:
        sizes = {name: tensor.nbytes for name, tensor in pinned.items() if tensor.device == device}
        for num_bytes, offsets in blocks_of(sizes):
            try:
                with torch.cuda.device(device):  # as above: torch looks for such memory that copies no longer use
                    block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                raise MemoryError("the host has too little memory for the copy of a checkpoint") from error
            for name, start in offsets.items():
                buffer = block[start : start + sizes[name]]
                host[name] = buffer.view(pinned[name].dtype).view(pinned[name].shape)
    return host


def blocks_of(sizes: Mapping[str, int]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the bytes of blocks of memory that hold tensors, each with the first byte of its tensors.

    Torch rounds the size of page-locked memory up to a power of two: tensor by tensor, the copy of a GPT-2 would take
    1.6 times its size.

    Args:
        sizes: bytes of each tensor.

    Example:
        >>> list(blocks_of({"a": 64, "b": 192, "c": 100}))
        [(256, {'b': 0, 'a': 192}), (128, {'c': 0})]
    """
    waiting = {
        name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    }
    while waiting:
        largest, total = max(waiting.values()), sum(waiting.values())
        least = 1 << (largest - 1).bit_length()
        block = max(least, min(max(_BLOCK, 8 * least), 1 << (total.bit_length() - 1)))
        offsets, end = dict[str, int](), 0
        for name, size in waiting.items():
            if end + size <= block:
                offsets[name], end = end, end + size
        yield block, offsets
        waiting = {name: size for name, size in waiting.items() if name not in offsets}


class Snapshot:
    """The latest copies by name; they take the memory of one checkpoint, and later copies allocate no memory.

    The system finds and clears a page of new memory at the first write to it, which takes several times as long as the
    copy: `prepare` does this in a thread while the training continues.

    Tensors of the host are copied when `take` returns. Those of a GPU are copied on streams of their own, to pinned
    memory: the host continues, and the stream of the training waits for the copies before it changes their sources.

    Args:
        overlaps: whether steps announce their phases, and only steps change the state. If not, the stream of the
            training waits for all copies at once.
        stream_of: returns the copies of a device; None: its tensors are copied at once.
    """

    def __init__(
        self, *, overlaps: bool = False, stream_of: Callable[[torch.device], CopyStream | None] = stream_of
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.overlaps, self._stream_of = overlaps, stream_of
        self._preparing: threading.Thread | None = None
        self._copying: list[CopyStream] = []
        """The copies since the last `take`."""
        self._awaited: dict[Part, list[CopyStream]] = {}
        """The copies that the training has not waited for."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory of later copies in the background; meanwhile the tensors may change."""
        self.wait_prepared()
        self._preparing = threading.Thread(target=self._allocate, args=(dict(tensors),), name="staging", daemon=True)
        self._preparing.start()

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to the host; the copies are complete when `wait_copied` has returned.

        Args:
            tensors: by the names of a checkpoint, `param/`, `buffer/` and `optimizer/` before their own.
        """
        self.wait_prepared()
        self._hold(_ALL)
        reused = {
            name: buffer for name, buffer in self.buffers.items() if name in tensors and _fits(buffer, tensors[name])
        }
        allocated = _allocated({name: tensor for name, tensor in tensors.items() if name not in reused})
        self.buffers = {name: reused[name] if name in reused else allocated[name] for name in tensors}
        copies: dict[tuple[Part, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for name, tensor in tensors.items():
            part = _PART_OF.get(name.partition("/")[0], "other")
            copies.setdefault((part, tensor.device), []).append((tensor.detach(), self.buffers[name]))
        self._copying = []
        for part in _ALL:
            for device in {device for kind, device in copies if kind == part}:
                pairs = copies[part, device]
                if (stream := self._stream_of(device)) is None:
                    for source, target in pairs:
                        target.copy_(source)
                else:
                    stream.start(pairs)
                    self._copying.append(stream)
                    self._awaited.setdefault(part, []).append(stream)
        self._hold(("other",) if self.overlaps else _ALL)
        return dict(self.buffers)

    def on_phase(self, phase: str, step: int) -> None:
        """Let the device wait for copies before a phase that may change their tensors."""
        del step
        if self._awaited:
            self._hold(_CHANGED_BY.get(phase, _ALL))

    def wait_copied(self) -> None:
        """Wait, on the host, until the copies of the last `take` are complete; from any thread.

        Raises:
            RuntimeError: a device has failed.
        """
        for stream in self._copying:
            stream.wait()

    def wait_prepared(self) -> None:
        """Wait until the memory is allocated."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def release(self) -> None:
        """Free the memory."""
        self.wait_prepared()
        self._hold(_ALL)
        self.buffers.clear()
        self._copying = []

    def _hold(self, parts: tuple[Part, ...]) -> None:
        """Let the training wait on its devices for the copies of parts; the host continues."""
        for part in parts:
            for stream in self._awaited.pop(part, ()):
                stream.hold()

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        with suppress(RuntimeError, MemoryError):  # no memory: the save itself will report it
            allocated = _allocated({name: tensor for name, tensor in tensors.items() if name not in self.buffers})
            for name, buffer in allocated.items():
                if tensors[name].device.type != "cuda":
                    buffer.reshape(-1).view(torch.uint8)[::_PAGE].zero_()  # write a byte of each page
            self.buffers |= allocated


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
