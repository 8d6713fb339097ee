"""Convert between the full tensors of a checkpoint and the rows that servers hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from trainkit.strategies.parameter_server.wire.protocol import as_dtype
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard, VariableShards
from trainkit.strategies.tensors.lazy_state import name_in, read_slice, shape_of

__all__ = ["FullStateAssembler", "rows_to_load"]


class FullStateAssembler:
    """Full tensors that are filled with the rows of all servers; thread-safe."""

    def __init__(self, shares: VariableShards) -> None:
        self._shares = shares
        self._found: dict[str, Tensor] = {}
        self._lock = Lock()

    def add(self, link: Connection, frame: Frame, server: int) -> None:
        """Read the rows of a tensor into the full tensor."""
        key, shape = str(frame.meta["key"]), torch.Size(frame.meta["shape"])
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
    """Yield the tensors that a server needs from a checkpoint, name by name; nothing else is read.

    Args:
        pieces: the pieces of the server.
        tensors: names -> full tensors.
        unsaved: buffers that no checkpoint holds.
    """
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
