"""Decode the frames that a server receives: every number is validated before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from trainkit.strategies.parameter_server.server.gradient_buffer import BufferPool, Parts, StagedGradient
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard
from trainkit.strategies.tensors.layouts import find_sparse, view_of

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_KEY_LENGTH: Final = 128


class RequestRejectedError(Exception):
    """A request that cannot be answered; the message is sent to the requesting task."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a frame.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def mask_of(flags: Sequence[bool]) -> str:
    """Encode flags for a frame.

    Example:
        >>> mask_of([True, False, True, True, True])
        '1d'
    """
    return f"{sum(1 << place for place, flag in enumerate(flags) if flag):x}"


def row_dtype(num_rows: int) -> torch.dtype:
    """Return the dtype of transferred row indices."""
    return torch.int32 if num_rows < 2**31 else torch.int64


def as_flags(frame: Frame, key: str, count: int) -> list[bool]:
    """Decode `count` flags that `mask_of` encoded."""
    text = frame.meta.get(key)
    try:
        mask = int(text, 16) if isinstance(text, str) else -1
    except ValueError:
        mask = -1
    if mask < 0 or mask >> count:
        raise RequestRejectedError(f"{frame.kind}: {key} is not a mask of {count}")
    bits = bin(mask)[:1:-1].ljust(count, "0")
    return [bit == "1" for bit in bits[:count]]


def as_dtype(frame: Frame) -> torch.dtype:
    """Decode the dtype of a frame's numbers."""
    found = _DTYPES.get(str(frame.meta.get("dtype")))
    if found is None:
        raise RequestRejectedError(f"{frame.kind}: not a dtype")
    return found


def as_count(frame: Frame, key: str, most: int = 2**53) -> int:
    """Decode a non-negative whole number."""
    value = frame.meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise RequestRejectedError(f"{frame.kind}: {key} is not a number up to {most}")
    return value


def as_float(frame: Frame, key: str) -> float:
    """Decode a factor; 1 if it is missing."""
    value = frame.meta.get(key, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestRejectedError(f"{frame.kind}: {key} is not a number")
    return float(value)


def as_keys(frame: Frame) -> list[str]:
    """Decode names of gradients."""
    value = frame.meta.get("keys")
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= _KEY_LENGTH for one in value):
        raise RequestRejectedError(f"{frame.kind}: keys are not names")
    return value


def take_tensor(link: Connection, frame: Frame, most_bytes: int) -> Tensor:
    """Read a tensor that a frame describes, of at most `most_bytes`."""
    shape, dtype = frame.meta.get("shape"), as_dtype(frame)
    if not isinstance(shape, list) or not all(isinstance(size, int) and 0 <= size < 2**53 for size in shape):
        raise RequestRejectedError(f"{frame.kind}: no shape")
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes > most_bytes:
        raise RequestRejectedError(f"{frame.kind}: {num_bytes} bytes, and at most {most_bytes} are allowed")
    tensor = torch.empty(shape, dtype=dtype)
    link.read([tensor])
    return tensor


def decode_gradient(link: Connection, frame: Frame, pieces: Sequence[RowShard], pool: BufferPool) -> StagedGradient:
    """Decode a pushed gradient: dense gradients, sums of buffers, then sparse gradients as rows and values."""
    flags, counts, wire_dtype = as_flags(frame, "have", len(pieces)), _as_rows(frame, pieces), as_dtype(frame)
    dense = [number for number, flag in enumerate(flags) if flag and number not in counts]
    if any(pieces[number].variable.kind == "frozen" for number in dense):
        raise RequestRejectedError(f"{frame.kind}: a gradient of an untrained variable")
    params = [number for number in dense if pieces[number].variable.kind == "param"]
    memory = pool.take(sum(pieces[number].numel for number in params))
    received = memory if wire_dtype is pool.dtype else torch.empty(memory.numel(), dtype=wire_dtype)
    buffers = {n: torch.empty(pieces[n].shape, dtype=pool.dtype) for n in dense[len(params) :]}
    sparse = {number: _allocate_sparse(pieces[number], count, wire_dtype) for number, count in counts.items()}
    link.read([received, *buffers.values(), *(tensor for pair in sparse.values() for tensor in pair)])
    if received is not memory:
        memory.copy_(received)
    parts: Parts = [None] * len(pieces)
    for number, view in zip(params, memory.split_with_sizes([pieces[n].numel for n in params]), strict=True):
        parts[number] = view_of(view, pieces[number].shape, pieces[number].strides)
    for number, total in buffers.items():
        parts[number] = total
    for number, (rows, values) in sparse.items():
        parts[number] = _sparse(pieces[number], rows, values.to(pool.dtype))
    find_sparse(parts)
    return StagedGradient(parts, memory)


def _as_rows(frame: Frame, pieces: Sequence[RowShard]) -> dict[int, int]:
    """Decode the indices of sparse pieces, and the number of their rows."""
    described = frame.meta.get("rows", {})
    if not isinstance(described, dict):
        raise RequestRejectedError(f"{frame.kind}: row indices without a variable")
    found = {}
    for text, count in described.items():
        number = int(text) if text.isdecimal() and len(text) < 9 else -1
        if not 0 <= number < len(pieces):
            raise RequestRejectedError(f"{frame.kind}: row indices without a variable")
        if pieces[number].variable.kind != "param" or not pieces[number].variable.shape:
            raise RequestRejectedError(f"{frame.kind}: the variable is not sparse")
        if not isinstance(count, int) or not 0 <= count <= pieces[number].shape[0]:
            raise RequestRejectedError(f"{frame.kind}: more row indices than rows")
        found[number] = count
    return found


def _allocate_sparse(piece: RowShard, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = torch.empty(count, dtype=row_dtype(piece.variable.num_rows))
    return rows, torch.empty((count, *piece.shape[1:]), dtype=dtype)


def _sparse(piece: RowShard, rows: Tensor, values: Tensor) -> Tensor:
    if len(rows) and not (rows[0] >= 0 and rows[-1] < piece.shape[0] and bool((rows[1:] > rows[:-1]).all())):
        raise RequestRejectedError("push: row indices that do not exist, or are not in order")
    indices = rows.long().unsqueeze(0)
    return torch.sparse_coo_tensor(indices, values, piece.shape, is_coalesced=True, check_invariants=False)
