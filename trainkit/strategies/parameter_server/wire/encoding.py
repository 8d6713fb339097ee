"""Encode the data between a client and a server: pulled variables, gradients, and rows of a checkpoint."""

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
from trainkit.strategies.tensors.layouts import in_layout, in_memory_order
from trainkit.strategies.tensors.lazy_state import name_in, read_slice, shape_of
from trainkit.strategies.tensors.staging import ByteLayout, TensorKind, host_bytes, moved


class PullBuffer:
    """The memory into which a server's variables are read: that of the tensors themselves, if possible.

    Args:
        into: one tensor per variable; None: not read.
        whole: whether untrained variables are read as well.
        dtype: the dtype in which trainable parameters are transferred.
    """

    def __init__(
        self, pieces: Sequence[RowShard], into: Sequence[Tensor | None], *, whole: bool, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._apart: list[Tensor] = []
        """Tensors into which the numbers cannot be read directly: they have another device, dtype or layout."""
        flags, kinds, targets = [], [], []
        for piece in pieces:
            target = into[piece.place]
            wanted = target is not None and (whole or piece.variable.kind != "frozen")
            flags.append(wanted)
            if wanted and target is not None:
                wire_dtype = dtype if piece.variable.kind == "param" else piece.variable.dtype
                # the server sends the memory of its piece in its own layout
                kinds.append(TensorKind(torch.Size(piece.shape), wire_dtype, piece.strides))
                targets.append(piece.of(target.detach()))
        self.mask = mask_of(flags)
        pairs = list(zip(targets, kinds, strict=True))
        self._apart = [target for target, kind in pairs if not _takes(target, kind)]
        self._device = self._apart[0].device if self._apart else torch.device("cpu")
        self._layout = ByteLayout([kind for target, kind in pairs if not _takes(target, kind)])
        self._host = host_bytes(self._layout.size, self._device)
        memory = iter(self._layout.views(self._host))
        own = [target if _takes(target, kind) else next(memory) for target, kind in pairs]
        self.views = [memory_of(in_memory_order(one)) for one in own if one.numel()]

    def settle(self) -> None:
        """Copy the numbers received into separate memory to their tensors, in one transfer to the device."""
        if self._apart:
            torch._foreach_copy_(self._apart, self._layout.views(self._host.to(self._device)))


def _takes(tensor: Tensor, kind: TensorKind) -> bool:
    """Return whether the numbers of a tensor of a kind can be read into the memory of a tensor."""
    fits = tensor.is_contiguous() if kind.strides is None else tensor.stride() == kind.strides
    return tensor.device.type == "cpu" and tensor.dtype is kind.dtype and fits


def on_the_wire(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Return gradients, or sums of buffers, in the form for sending: on the CPU after one transfer, sparse ones
    coalesced.
    """
    pairs = zip(tensors, dtypes, strict=True)
    return moved([None if one is None else _plain(one.detach()).to(dtype) for one, dtype in pairs], torch.device("cpu"))


def _plain(grad: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad
    return grad.coalesce() if grad.sparse_dim() == 1 else grad.to_dense()


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
