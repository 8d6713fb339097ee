"""The tensors of a checkpoint, read from its verified files on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainkit.bounded_json import expect_map, expect_maps
from trainkit.strategies.tensors.lazy_state import LazyStateDict
from trainkit.strategies.tensors.sharded import coverage_error
from trainkit.trainer.checkpoint.dtypes import DTYPES
from trainkit.trainer.checkpoint.tensor_file import TensorFile, lengths_in

_MAX_PIECES: Final = 1 << 14
"""Limit of the pieces of one tensor: one per rank that held a part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPiece:
    """A piece of a tensor, and its place in a file."""

    file: TensorFile
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def overlap(self, region: Sequence[tuple[int, int]]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the overlap with a region, in indices of the region and of the piece; None if there is none."""
        there, here = [], []
        for (start, stop), first, length in zip(region, self.offset, self.size, strict=True):
            begin, end = max(start, first), min(stop, first + length)
            if begin >= end:
                return None
            there.append(slice(begin - start, end - start))
            here.append(slice(begin - first, end - first))
        return tuple(there), tuple(here)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[_StoredPiece, ...]


class StoredTensors(LazyStateDict):
    """Tensors by name, on the host, contiguous; a tied name returns the same tensor object while that is in use.

    The files stay open: they may be pruned while the tensors are in use. What is read is compared with what was
    verified.

    Raises:
        KeyError, TypeError, ValueError: the index does not match the files.
    """

    def __init__(self, entries: Mapping[str, Any], aliases: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
        self._entries = {name: _entry(name, content, files) for name, content in entries.items()}
        self._entries |= {alias: self._entries[name] for alias, name in aliases.items()}
        self._aliases = {**aliases, **{name: name for name in aliases.values()}}
        self._in_use: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        written = self._aliases.get(name)  # None: no name is tied to it
        tensor = None if written is None else self._in_use.get(written)
        if tensor is None:
            entry = self._entries[name]
            tensor = self._read(entry, [(0, length) for length in entry.shape])
            if written is not None:
                self._in_use[written] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a tensor without reading it."""
        return torch.Size(self._entries[name].shape)

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Read a region of a tensor from the pieces that overlap it, one after the other.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        entry = self._entries[name]
        bounds = [part.indices(length)[:2] for part, length in zip(region, entry.shape, strict=True)]
        return self._read(entry, bounds)

    @staticmethod
    def _read(entry: _StoredTensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
        size = [max(stop - start, 0) for start, stop in bounds]
        if len(entry.pieces) == 1 and list(entry.shape) == size:
            return entry.pieces[0].file.read(entry.pieces[0].key)
        found = torch.empty(size, dtype=entry.dtype)
        for piece in entry.pieces:
            overlap = piece.overlap(bounds)
            if overlap is not None:
                there, here = overlap
                found[there] = piece.file.read(piece.key)[here]
        return found


def _entry(name: str, content: Any, files: Mapping[str, TensorFile]) -> _StoredTensor:
    expect_map(content, {"shape": list, "dtype": str, "pieces": list})
    listed = expect_maps(content["pieces"], {"file": str, "offset": list, "size": list}, optional={"key": str})
    if len(listed) > _MAX_PIECES:
        raise ValueError(f"{name}: it has {len(listed):,} pieces, and at most {_MAX_PIECES:,} are read")
    shape, dtype = lengths_in(content["shape"]), DTYPES[content["dtype"]]
    pieces = tuple(
        _StoredPiece(
            file=files[piece["file"]],
            key=piece.get("key", name),
            offset=lengths_in(piece["offset"]),
            size=lengths_in(piece["size"]),
        )
        for piece in listed
    )
    if wrong := coverage_error(shape, [(piece.offset, piece.size) for piece in pieces]):
        raise ValueError(f"{name}: {wrong}")
    for piece in pieces:
        if piece.file.kind_of(piece.key) != (dtype, piece.size):
            found = piece.file.kind_of(piece.key)
            raise ValueError(f"a piece of {name} is {found}, not {(dtype, piece.size)}")
    return _StoredTensor(dtype=dtype, shape=shape, pieces=pieces)
