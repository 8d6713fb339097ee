"""Encode what a client and a server exchange: pulled variables, gradients, and the rows of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from trainkit.bounded import expect_map
from trainkit.strategies.parameter_server.wire.protocol import as_dtype, dtype_name, mask_of, row_dtype
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame, memory_of
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard, VariableShards
from trainkit.strategies.tensors.layouts import in_layout, in_memory_order, view_of
from trainkit.strategies.tensors.lazy_state import name_in, read_slice, shape_of


class PullBuffer:
    """The memory that a server's variables are read into: that of the tensors themselves, if possible.

    Args:
        into: one tensor per variable; None: not read.
        whole: whether untrained variables are read, too.
        dtype: the dtype in which trainable parameters are transferred.
    """

    def __init__(
        self, pieces: Sequence[RowShard], into: Sequence[Tensor | None], *, whole: bool, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.views: list[memoryview] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        flags = []
        for piece in pieces:
            target = into[piece.place]
            wanted = target is not None and (whole or piece.variable.kind != "frozen")
            flags.append(wanted)
            if wanted and target is not None:
                self._add(piece, piece.of(target.detach()))
        self.mask = mask_of(flags)

    def _add(self, piece: RowShard, target: Tensor) -> None:
        wire_dtype = self.dtype if piece.variable.kind == "param" else piece.variable.dtype
        strides = piece.strides  # the server sends the memory of its piece in its own layout
        fits = target.is_contiguous() if strides is None else target.stride() == strides
        if target.device.type != "cpu" or target.dtype is not wire_dtype or not fits:
            memory = view_of(torch.empty(piece.numel, dtype=wire_dtype), piece.shape, strides)
            self._moves.append((target, memory))
            target = memory
        if target.numel():
            self.views.append(memory_of(in_memory_order(target)))

    def settle(self) -> None:
        """Copy what was received into separate memory to its tensors."""
        for target, memory in self._moves:
            target.copy_(memory)


def on_the_wire(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient as it is sent: on the CPU, sparse ones coalesced."""
    if grad is None:
        return None
    if not grad.is_sparse:
        return grad.detach().to("cpu", dtype)
    if grad.sparse_dim() != 1:
        return grad.detach().to_dense().to("cpu", dtype)
    return grad.detach().coalesce().to("cpu", dtype)


def encode_for_server(
    pieces: Sequence[RowShard], tensors: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[dict[str, Any], list[Tensor]]:
    """Encode the part of a gradient for one server.

    Returns:
        The fields of the frame, and its tensors: dense gradients, sums of buffers, then rows and values of sparse ones.
    """
    flags: list[bool] = []
    dense: list[Tensor] = []
    sparse: list[Tensor] = []
    counts: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        tensor = tensors[piece.place]
        flags.append(tensor is not None)
        if tensor is not None and tensor.is_sparse:
            found = _rows_of(piece, tensor)
            counts[str(number)] = len(found[0])
            sparse.extend(found)
        elif tensor is not None:
            dense.append(in_memory_order(in_layout(piece.of(tensor), piece.strides)))
    meta: dict[str, Any] = {"have": mask_of(flags), "dtype": dtype_name(dtype)}
    return meta | ({"rows": counts} if counts else {}), [*dense, *sparse]


def _rows_of(piece: RowShard, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a coalesced gradient that lie in a piece, relative to its first row, and their values."""
    rows = grad.indices()[0]
    first, last = torch.searchsorted(rows, torch.tensor([piece.start, piece.stop])).tolist()
    return (rows[first:last] - piece.start).to(row_dtype(piece.variable.num_rows)), grad.values()[first:last]


class FullStateAssembler:
    """Full tensors that are filled with the rows of all servers; thread-safe."""

    def __init__(self, shares: VariableShards) -> None:
        self._shares = shares
        self._found: dict[str, Tensor] = {}
        self._lock = Lock()

    def add(self, link: Connection, frame: Frame, server: int) -> None:
        """Read the rows of a tensor into the full tensor."""
        meta = expect_map(frame.meta, {"key": str, "shape": list})
        key, shape = meta["key"], torch.Size(meta["shape"])
        piece = self._piece(server, key)
        is_part = not piece.is_whole and shape == piece.shape
        with self._lock:
            whole = self._found.get(key)
            if whole is None or not is_part:
                size = piece.variable.shape if is_part else shape
                whole = self._found[key] = torch.empty(size, dtype=as_dtype(frame))
        link.read([piece.of(whole) if is_part else whole])

    def _piece(self, server: int, key: str) -> RowShard:
        """Return the piece that belongs to a name in a checkpoint."""
        name = name_in(key)
        kinds = ("buffer",) if key.startswith("buffer/") else ("param", "frozen")
        return next(p for p in self._shares.pieces[server] if p.variable.name == name and p.variable.kind in kinds)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, those of the model in the order of the variables."""
        keys = [variable.key for variable in self._shares.variables if variable.key in self._found]
        return {key: self._found[key] for key in dict.fromkeys([*keys, *self._found])}


def rows_to_load(
    pieces: Sequence[RowShard], tensors: Mapping[str, Tensor], unsaved: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a server needs from a checkpoint, name by name; nothing else is read."""
    trained = {piece.variable.name: piece for piece in pieces if piece.variable.kind == "param"}
    for piece in pieces:
        variable = piece.variable
        held = tensors if variable.key in tensors else unsaved
        yield variable.key, read_slice(held, variable.key, piece.region).detach().to("cpu", variable.dtype)
    for key in tensors:
        kind, _, rest = key.partition("/")
        slot, _, name = rest.partition("/")
        if kind == "optimizer" and name in trained and "@" not in slot:
            piece = trained[name]
            is_part = shape_of(tensors, key) == piece.variable.shape
            yield key, (read_slice(tensors, key, piece.region) if is_part else tensors[key]).detach().to("cpu")
