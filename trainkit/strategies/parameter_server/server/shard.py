"""The shard of one server: its rows of the variables, the optimizer that updates them, and their version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from trainkit.strategies.core.optimizer import OptimizerStepper, optimizer_state
from trainkit.strategies.parameter_server.server.gradient_buffer import BufferPool, Parts
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard
from trainkit.strategies.tensors.layouts import FlatBuffer


@dataclass(slots=True)
class _Memory:
    """The memory of all master parameters, contiguous."""

    flat: Tensor
    readers: int = 0
    """Number of clients that read it; while there are any, it does not change."""

    def add_reader(self) -> None:
        """Count a client that begins to read."""
        self.readers += 1

    def remove_reader(self) -> None:
        """Count a client that has finished."""
        self.readers -= 1


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Variables of one version, which do not change until the lease ends."""

    version: int
    loads: int
    """Number of loads of the variables: untrained ones change only by a load."""
    tensors: list[Tensor]
    memory: _Memory | None
    """Memory of which the tensors are views; None if they are copies."""


class ServerShard:
    """The rows of a server. Not thread-safe: the caller holds the server's lock.

    Master parameters are contiguous in memory, which is sent directly. An update during a send goes to a copy, so that
    neither waits for the other: a worker that stops while reading blocks no other.
    """

    def __init__(
        self,
        pieces: Sequence[RowShard],
        dtype: torch.dtype,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.pieces = tuple(pieces)
        self.params = [piece for piece in pieces if piece.variable.kind == "param"]
        self.version: int | None = None
        self.loads = 0
        shapes, strides = [torch.Size(p.shape) for p in self.params], [p.strides for p in self.params]
        self._packing = FlatBuffer(shapes, dtype, torch.device("cpu"), strides=strides)
        self._memory = _Memory(self._packing.empty())
        self._pool = BufferPool(dtype)
        views = zip(self.params, self._packing.views(self._memory.flat), strict=True)
        self.masters = {piece.variable.name: nn.Parameter(view) for piece, view in views}
        rest = [piece for piece in pieces if piece.variable.kind != "param"]
        self._added = [piece.variable.is_added for piece in rest]
        self._rest = [torch.zeros(piece.shape, dtype=piece.variable.dtype) for piece in rest]
        self._stepper = (
            OptimizerStepper(make_optimizer(self.masters), list(self.masters.values())) if self.masters else None
        )
        self._rounded: dict[torch.dtype, Tensor] = {}

    def begin_read(self, chosen: Sequence[bool], dtype: torch.dtype) -> ReadLease:
        """Begin to read pieces, while updates may continue."""
        count = len(self.params)
        memory = self._memory if dtype is self._packing.dtype else None
        flat = self._memory.flat if memory is not None else self._rounded_to(dtype)
        if memory is not None:
            memory.add_reader()
        rest = [tensor.clone() for tensor, flag in zip(self._rest, chosen[count:], strict=True) if flag]
        assert self.version is not None
        return ReadLease(self.version, self.loads, [*self._contiguous_views(flat, chosen[:count]), *rest], memory)

    def end_read(self, lease: ReadLease) -> None:
        """End a lease, so that its memory may change again."""
        memory = lease.memory
        if memory is not None:
            memory.remove_reader()
            if not memory.readers and memory is not self._memory:
                self._pool.give(memory.flat)

    def rows(self, piece: RowShard, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of some rows of a trainable piece."""
        master = self.masters[piece.variable.name]
        return master.detach().index_select(0, rows).to(dtype)

    @torch.no_grad()
    def update(self, gradient: Parts, *, version: int, lr_factor: float, buffer_factor: float = 1.0) -> None:
        """Step the optimizer and replace the buffers by scaled sums; an empty gradient only sets the version."""
        count = len(self.params)
        if gradient and self._stepper is not None:
            self._copy_on_write()
            with torch.enable_grad():  # optimizers expect to be called with grad enabled
                self._stepper.step(gradient[:count], lr_factor)
            self._rounded.clear()
        for tensor, total, is_added in zip(self._rest, gradient[count:], self._added, strict=False):
            if total is not None and tensor.is_floating_point() and is_added:
                tensor.copy_(tensor + total)
            elif total is not None and tensor.is_floating_point():
                tensor.copy_(total if buffer_factor == 1.0 else total * buffer_factor)
            elif total is not None:
                tensor.add_(total.round().to(tensor.dtype))
        self.version = version

    def stays_finite(self, sums: Parts) -> bool:
        """Return whether finite buffers stay finite in their sums."""
        pairs = zip(self._rest, sums[len(self.params) :], strict=False)
        floats = [(tensor, total) for tensor, total in pairs if total is not None and tensor.is_floating_point()]
        return all(bool(total.isfinite().all()) or not bool(tensor.isfinite().all()) for tensor, total in floats)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint names and rows of this server; no copies."""
        for piece, tensor in zip(self.pieces, self._tensors(), strict=True):
            if piece.variable.saved:
                yield piece.variable.key, tensor.detach()
        if self._stepper is not None:
            yield from optimizer_state(self._stepper.optimizer, self.masters).items()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load rows by their names in a checkpoint."""
        self._copy_on_write()
        for piece, tensor in zip(self.pieces, self._tensors(), strict=True):
            tensor.copy_(tensors[piece.variable.key])
        if self._stepper is not None:
            self._stepper.restore(self.masters, tensors)
        self._rounded.clear()
        self.version = version
        self.loads += 1

    def _tensors(self) -> list[Tensor]:
        """Return one tensor per piece."""
        return [*self.masters.values(), *self._rest]

    def _copy_on_write(self) -> None:
        """Copy-on-write: if a client is still reading the current buffer, switch to a copy before updating."""
        if not self._memory.readers:
            return
        flat = self._pool.take(self._packing.numel)
        flat.copy_(self._memory.flat)
        self._memory = _Memory(flat)
        for master, view in zip(self.masters.values(), self._packing.views(flat), strict=True):
            master.data = view

    def _rounded_to(self, dtype: torch.dtype) -> Tensor:
        """Return all master parameters in another dtype, computed once per version."""
        if dtype not in self._rounded:
            self._rounded[dtype] = self._memory.flat.to(dtype)
        return self._rounded[dtype]

    def _contiguous_views(self, flat: Tensor, chosen: Sequence[bool]) -> list[Tensor]:
        """Return views of the vector for the chosen pieces; neighbours are combined."""
        if all(chosen):
            return [flat]
        found, offsets = [], self._packing.offsets
        for flag, run in groupby(range(len(chosen)), key=lambda number: chosen[number]):
            if flag:
                numbers = list(run)
                found.append(flat[offsets[numbers[0]] : offsets[numbers[-1] + 1]])
        return found
