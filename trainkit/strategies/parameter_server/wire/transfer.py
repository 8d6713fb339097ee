"""What a client and one server exchange: where pulled variables land, and what of a gradient is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.strategies.parameter_server.wire.protocol import dtype_name, mask_of, row_dtype
from trainkit.strategies.parameter_server.wire.transport import memory_of
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard
from trainkit.strategies.tensors.layouts import in_layout, in_memory_order, view_of

__all__ = ["PullBuffer", "encode_for_server", "on_the_wire"]


class PullBuffer:
    """The memory that a server's variables are read into: that of the tensors themselves, where it can be.

    Args:
        pieces: what the server holds.
        into: a tensor a variable; None: not read.
        whole: whether what is not trained is read, too.
        dtype: what trainable parameters travel in.
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
        arriving = self.dtype if piece.variable.kind == "param" else piece.variable.dtype
        strides = piece.strides  # the server sends the memory of its piece as it lies
        fits = target.is_contiguous() if strides is None else target.stride() == strides
        if target.device.type != "cpu" or target.dtype is not arriving or not fits:
            memory = view_of(torch.empty(piece.numel, dtype=arriving), piece.shape, strides)
            self._moves.append((target, memory))
            target = memory
        if target.numel():
            self.views.append(memory_of(in_memory_order(target)))

    def settle(self) -> None:
        """Move on what has arrived apart."""
        for target, memory in self._moves:
            target.copy_(memory)


def on_the_wire(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A gradient as it is sent: on the CPU, sparse ones with each row once."""
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
    """What a server gets of a gradient.

    Args:
        pieces: what it holds.
        tensors: one a variable, as they are sent; None where there is none.
        dtype: what gradients are sent in.

    Returns:
        What the frame says, and its numbers: dense gradients, sums of buffers, then rows and values of sparse ones.
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
    """The rows of a coalesced gradient that lie in a piece, counted from its first, and their values."""
    rows = grad.indices()[0]
    first, last = torch.searchsorted(rows, torch.tensor([piece.start, piece.stop])).tolist()
    return (rows[first:last] - piece.start).to(row_dtype(piece.variable.num_rows)), grad.values()[first:last]
