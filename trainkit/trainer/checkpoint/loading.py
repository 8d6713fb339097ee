"""Load a checkpoint: verify it before any of it is used, then read it tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainkit.bounded import expect_map, expect_maps, parse_json
from trainkit.config.commands import shell_word
from trainkit.config.grammar import setting
from trainkit.errors import CheckpointError, UnreadableError
from trainkit.files import read_bytes
from trainkit.frames import first_line
from trainkit.strategies.tensor_shards import coverage_error
from trainkit.strategies.tensors.lazy_state import LazyStateDict
from trainkit.trainer.checkpoint.tensor_file import DTYPES, TensorFile, lengths_in
from trainkit.trainer.manifest import (
    MANIFEST,
    Checkpoint,
    NewerFormatError,
    damaged,
    foreign,
    list_all,
    manifest_below,
    read_manifest,
)
from trainkit.trainer.ownership import OwnershipToken

_MAX_BYTES: Final = 1 << 30
"""Size limit of an index, which has about a hundred bytes for each piece of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The content of a checkpoint; every byte was compared with its SHA-256."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    """Tensors by name, on the host, contiguous, read on access; a tied name returns the same tensor object."""
    aliases: Mapping[str, str]
    """Tied name -> the name it was written under."""
    meta: Mapping[str, Any]
    """The `meta` argument of `save`."""


def load(folder: Path) -> Loaded:
    """Verify one checkpoint: all its bytes are read, and its tensors are read again on access.

    The files are not memory-mapped: the folder may be pruned or replaced while its tensors are in use.

    Raises:
        CheckpointError: it is incomplete or damaged; the error names the file.
    """
    return _verified(read_manifest(folder))


def load_below(root: Path, name: str) -> Loaded:
    """Verify the checkpoint of a name in a `checkpoints` folder; otherwise like `load`.

    Raises:
        CheckpointError: it is incomplete, damaged, or a symbolic link.
    """
    return _verified(manifest_below(root, name))


def _verified(checkpoint: Checkpoint) -> Loaded:
    folder = checkpoint.folder
    index, rest = (_read_json(checkpoint, name) for name in ("index.json", "meta.json"))
    files = {
        name: TensorFile.verified(folder / name, record)
        for name, record in checkpoint.files.items()
        if name.endswith(".safetensors")
    }
    try:
        expect_map(index, {"tensors": dict, "aliases": dict})
        aliases: dict[str, str] = index["aliases"]
        tensors = StoredTensors(index["tensors"], aliases, files)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise damaged(folder, f"index.json does not fit the tensors ({first_line(error)[:200]})") from None
    meta = {**rest, "position": checkpoint.position, "fingerprint": checkpoint.fingerprint}
    return Loaded(checkpoint=checkpoint, tensors=tensors, aliases=aliases, meta=meta)


def meta_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the `meta` argument of `save`, and verify only that file.

    Raises:
        CheckpointError: the file is absent or damaged.
    """
    return _read_json(checkpoint, "meta.json")


def newest_valid(
    root: Path, report: Callable[[str], None], *, check: Callable[[Loaded], None] = lambda _: None
) -> Loaded | None:
    """Load the newest valid checkpoint of a run; damaged ones are reported and skipped.

    Args:
        root: a `checkpoints` folder.
        report: receives a line about each damaged one, with its replacement.
        check: raises CheckpointError for a valid one that cannot be used; it is skipped as well.

    Returns:
        None if the run has completed no checkpoint.

    Raises:
        CheckpointError: all existing checkpoints are damaged; or one is of a later version of trainkit.
    """
    problems: list[CheckpointError] = []
    for folder, entry in list_all(root):
        try:
            if isinstance(entry, CheckpointError):
                raise entry
            loaded = _verified(entry)
            check(loaded)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            problems.append(error)
            continue
        for problem in problems:
            report(f"{problem} Using {folder.name} instead.")
        return loaded
    # A run with a token and without an index has completed none.
    if problems and (OwnershipToken.found(root.parent) is None or (root / "index.json").exists()):
        raise CheckpointError("\n".join(["no checkpoint is undamaged:", *(f"  {problem}" for problem in problems)]))
    for problem in problems:
        report(f"{problem} This run has saved no checkpoint yet: that one stays in its place, and is not used.")
    return None


def note_foreign(root: Path, step: int, report: Callable[[str], None]) -> None:
    """Report the complete checkpoints of other runs that are newer than the step at which a run begins."""
    for entry in foreign(root):
        if entry.step > step:
            report(
                f"{entry.folder} was not written by this run: it stays in its place, and is not used. To start a run "
                f"from it: {shell_word(setting('resume', entry.folder))}"
            )


def _read_json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    folder = checkpoint.folder
    record = checkpoint.files.get(name)
    if record is None:
        raise damaged(folder, f"{name} is not listed in {MANIFEST}")
    try:
        content = read_bytes(folder / name, limit=min(record.num_bytes, _MAX_BYTES))
    except UnreadableError as error:
        raise damaged(folder, f"{name} cannot be read ({error.reason})") from None
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(folder, f"{name} has changed since it was written (SHA-256 differs)")
    try:
        return expect_map(parse_json(content), {})
    except ValueError as error:
        raise damaged(folder, f"{name} has changed since it was written ({error})") from None


_MAX_PIECES: Final = 1 << 14
"""Limit of the pieces of one tensor: one per rank with a part of it."""


class _Piece(NamedTuple):
    """A piece of a tensor, and its position in a file."""

    file: TensorFile
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


class _Stored(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    def read(self, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Read a region, given as begin and end dim by dim, from the pieces that overlap it."""
        size = tuple(max(stop - start, 0) for start, stop in bounds)
        if len(self.pieces) == 1 and self.shape == size:
            return self.pieces[0].file.read(self.pieces[0].key)
        found = torch.empty(size, dtype=self.dtype)
        for file, key, offset, length in self.pieces:
            ends = zip(bounds, offset, length, strict=True)
            cuts = [(start, first, max(start, first), min(stop, first + long)) for (start, stop), first, long in ends]
            if all(begin < end for *_, begin, end in cuts):
                there = tuple(slice(begin - start, end - start) for start, _, begin, end in cuts)
                found[there] = file.read(key)[tuple(slice(begin - first, end - first) for _, first, begin, end in cuts)]
        return found


class StoredTensors(LazyStateDict):
    """Tensors by name, on the host, contiguous; a tied name returns the same tensor object while that object is in use.

    The files stay open: they may be pruned while the tensors are in use. Each read is compared with the verified
    content.

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
            CheckpointError: it can no longer be read, or differs from the verified content.
        """
        written = self._aliases.get(name)  # None: no name is tied to it
        tensor = None if written is None else self._in_use.get(written)
        if tensor is None:
            entry = self._entries[name]
            tensor = entry.read([(0, length) for length in entry.shape])
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

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        return self._entries[name].dtype

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Read a region of a tensor from the pieces that overlap it, one after the other.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        entry = self._entries[name]
        return entry.read([part.indices(length)[:2] for part, length in zip(region, entry.shape, strict=True)])


def _entry(name: str, content: Any, files: Mapping[str, TensorFile]) -> _Stored:
    expect_map(content, {"shape": list, "dtype": str, "pieces": list})
    listed = expect_maps(content["pieces"], {"file": str, "offset": list, "size": list}, optional={"key": str})
    if len(listed) > _MAX_PIECES:
        raise ValueError(f"{name} has {len(listed):,} pieces; the limit is {_MAX_PIECES:,}")
    shape, dtype = lengths_in(content["shape"]), DTYPES[content["dtype"]]
    pieces = tuple(
        _Piece(files[one["file"]], one.get("key", name), lengths_in(one["offset"]), lengths_in(one["size"]))
        for one in listed
    )
    if wrong := coverage_error(shape, [(piece.offset, piece.size) for piece in pieces]):
        raise ValueError(f"{name}: {wrong}")
    for piece in pieces:
        if (found := piece.file.kind_of(piece.key)) != (dtype, piece.size):
            raise ValueError(f"a piece of {name} is {found}, not {(dtype, piece.size)}")
    return _Stored(dtype, shape, pieces)
