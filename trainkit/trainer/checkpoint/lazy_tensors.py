"""The tensors of a checkpoint, read out of its verified files when they are asked for."""

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

__all__ = ["StoredTensors"]

_MAX_PIECES: Final = 1 << 14
"""Pieces of one tensor: one for each rank that held some of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPiece:
    """A piece of a tensor, and where it is."""

    file: TensorFile
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def overlap(self, region: Sequence[tuple[int, int]]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where a region meets it, counted in the region and in the piece; None where it does not."""
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
    cuts: tuple[_StoredPiece, ...]


class StoredTensors(LazyStateDict):
    """By name, on the host, contiguous; a tied name gives the very tensor of its name, while that is in use.

    Its files stay open: they may be pruned while it is in use. What is read is compared with what was verified.

    Args:
        entries: what index.json says of each tensor, by name.
        aliases: tied name -> the name it was written under.
        files: the verified files by name.

    Raises:
        KeyError, TypeError, ValueError: the index does not fit the files.
    """

    def __init__(self, entries: Mapping[str, Any], aliases: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
        self._entries = {name: _entry(name, told, files) for name, told in entries.items()}
        self._entries |= {alias: self._entries[name] for alias, name in aliases.items()}
        self._aliases = {**aliases, **{name: name for name in aliases.values()}}
        self._in_use: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        written = self._aliases.get(name)  # None: nothing is tied to it
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
        """The shape of a tensor; nothing is read."""
        return torch.Size(self._entries[name].shape)

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A part of a tensor; the pieces that have some of it are read, one after the other.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        entry = self._entries[name]
        bounds = [part.indices(length)[:2] for part, length in zip(region, entry.shape, strict=True)]
        return self._read(entry, bounds)

    @staticmethod
    def _read(entry: _StoredTensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
        size = [max(stop - start, 0) for start, stop in bounds]
        if len(entry.cuts) == 1 and list(entry.shape) == size:
            return entry.cuts[0].file.read(entry.cuts[0].key)
        found = torch.empty(size, dtype=entry.dtype)
        for cut in entry.cuts:
            meeting = cut.overlap(bounds)
            if meeting is not None:
                there, here = meeting
                found[there] = cut.file.read(cut.key)[here]
        return found


def _entry(name: str, told: Any, files: Mapping[str, TensorFile]) -> _StoredTensor:
    expect_map(told, {"shape": list, "dtype": str, "pieces": list})
    pieces = expect_maps(told["pieces"], {"file": str, "offset": list, "size": list}, optional={"key": str})
    if len(pieces) > _MAX_PIECES:
        raise ValueError(f"{name}: it has {len(pieces):,} pieces, and at most {_MAX_PIECES:,} are read")
    shape, dtype = lengths_in(told["shape"]), DTYPES[told["dtype"]]
    cuts = tuple(
        _StoredPiece(
            file=files[piece["file"]],
            key=piece.get("key", name),
            offset=lengths_in(piece["offset"]),
            size=lengths_in(piece["size"]),
        )
        for piece in pieces
    )
    if wrong := coverage_error(shape, [(cut.offset, cut.size) for cut in cuts]):
        raise ValueError(f"{name}: {wrong}")
    for cut in cuts:
        if cut.file.kind_of(cut.key) != (dtype, cut.size):
            found = cut.file.kind_of(cut.key)
            raise ValueError(f"a piece of {name} is {found}, not {(dtype, cut.size)}")
    return _StoredTensor(dtype=dtype, shape=shape, cuts=cuts)
