"""Write and read a safetensors file: hash it while it is written, and verify it before any of it is used.

This module implements the format itself (an 8-byte length, a JSON header, raw bytes), to hash the bytes while they are
written and read. A file is read twice, once to verify it and once tensor by tensor, and never mapped: loading takes
only the memory of the tensors that are in use.

Source: https://huggingface.co/docs/safetensors, section Format.

A checkpoint is verified before any of it is used, then read tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainkit.config.commands import shell_word
from trainkit.config.grammar import setting
from trainkit.errors import CheckpointError, UnreadableError, first_line
from trainkit.files import expect_map, expect_maps, open_regular, parse_json, read_bytes, size_of, whole_numbers
from trainkit.objectives.base import Collective
from trainkit.strategies.tensor_shards import LazyStateDict, ShardedState, coverage_error, iter_gather_full
from trainkit.trainer.manifest import (
    MANIFEST,
    Checkpoint,
    FileRecord,
    NewerFormatError,
    damaged,
    list_all,
    manifest_below,
    read_manifest,
)
from trainkit.trainer.ownership import OwnershipToken

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""Name in the file -> dtype."""

NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, for any layout in memory (channels_last, a transposed view).

    A contiguous tensor on the host is not copied; others are, which waits for the device.
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that cannot be saved.

    Raises:
        CheckpointError: it is sparse or quantised, or of a dtype without a name in safetensors.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{name} cannot be saved: it is not a dense tensor with data.")
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} cannot be saved: safetensors has no name for {tensor.dtype}.")


_CHUNK: Final = 8 << 20
_MAX_HEADER: Final = 100_000_000  # the format's own limit
_MAX_DIMS: Final = 64  # torch's own limit
_MAX_NUMEL: Final = 1 << 63

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name of a tensor -> its dtype and shape."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors to a new file, flushed to the disk.

    Raises:
        OSError: the file could not be written; it is then incomplete.
    """
    return write_stream(path, kinds_of(tensors), tensors.__getitem__)


def kinds_of(tensors: Mapping[str, Tensor]) -> Kinds:
    """Return the dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_stream(path: Path, kinds: Kinds, read: Callable[[str], Tensor]) -> FileRecord:
    """Write tensors that are read one after the other to a new file, flushed to the disk.

    Args:
        path: the file; it must not exist.
        kinds: dtype and shape of each tensor for the header, which is written first.
        read: returns a tensor of that dtype and shape; called once per tensor.

    Raises:
        OSError: the file could not be written; it is then incomplete.
    """
    names, text = header_of(kinds)
    header = memoryview(len(text).to_bytes(8, "little") + text)
    return _written(path, chain([header], (bytes_of(read(name)) for name in names)))


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a small new file, flushed to the disk."""
    return _written(path, [memoryview(content)])


def _written(path: Path, contents: Iterable[memoryview]) -> FileRecord:
    """Write a new file, and count and hash its bytes."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for content in contents:
            for start in range(0, len(content), _CHUNK):
                piece = content[start : start + _CHUNK]
                digest.update(piece)
                file.write(piece)
            num_bytes += len(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(num_bytes=num_bytes, sha256=digest.hexdigest())


def header_of(kinds: Kinds) -> tuple[list[str], bytes]:
    """Return the names of the tensors in the order of their bytes, and the header without its length."""
    # Write the widest dtypes first: every tensor is then aligned to its own element size.
    names = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = kinds[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return names, text + b" " * (-len(text) % 8)


class _TensorRecord(NamedTuple):
    """The place of a tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    crc: int = 0


class TensorFile:
    """A verified file, kept open: its tensors are read on access, even if the file was deleted in the meantime.

    Every byte was compared with the SHA-256 of the manifest once; later reads are compared with that first one.
    """

    def __init__(self, path: Path, file: BinaryIO, entries: Mapping[str, _TensorRecord]) -> None:
        self._path, self._file, self._entries = path, file, entries
        weakref.finalize(self, file.close)

    @classmethod
    def verified(cls, path: Path, record: FileRecord) -> Self:
        """Open a file and read all of it, storing only the places of its tensors.

        The header is untrusted until the hash is verified: sizes are bounded by the size of the file.

        Raises:
            CheckpointError: the bytes differ from the written ones.
        """
        try:
            file = open_regular(path, buffering=0)
        except UnreadableError as error:
            raise damaged(path.parent, f"{path.name} cannot be read ({error.reason})") from None
        try:
            return cls(path, file, _scanned(file, record))
        except (ValueError, KeyError):  # the bytes differ, or the header is a crafted one
            file.close()
            reason = f"{path.name} has changed since it was written (SHA-256 differs)"
        except OSError as error:
            file.close()
            reason = f"{path.name} cannot be read ({error})"
        raise damaged(path.parent, reason)

    @classmethod
    def opened(cls, path: Path) -> Self:
        """Open a file without a known hash, written by any program; otherwise like `verified`.

        Raises:
            CheckpointError: it is not a complete safetensors file.
        """
        try:
            record = FileRecord(num_bytes=size_of(path), sha256="")
        except UnreadableError as error:
            raise CheckpointError(f"{path} cannot be read: {error.reason}.") from None
        try:
            return cls.verified(path, record)
        except CheckpointError:
            raise CheckpointError(f"{path} is not a complete safetensors file.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def kind_of(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape of a tensor.

        Raises:
            KeyError: it is not in this file.
        """
        return self._entries[key][:2]

    def read(self, key: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            CheckpointError: it can no longer be read, or differs from the verified content.
        """
        entry = self._entries[key]
        buffer = torch.empty(entry.num_bytes, dtype=torch.uint8)
        target, crc = buffer.numpy().data, 0
        try:
            self._file.seek(entry.start)
            for start in range(0, entry.num_bytes, _CHUNK):
                piece = target[start : start + _CHUNK]
                if not _filled(self._file, piece):
                    raise damaged(self._path.parent, f"{self._path.name} was cut short after it was verified")
                crc = zlib.crc32(piece, crc)
        except OSError as error:
            raise damaged(self._path.parent, f"{self._path.name} cannot be read any more ({error})") from None
        if crc != entry.crc:
            raise damaged(self._path.parent, f"{self._path.name} was changed after it was verified")
        return buffer.view(entry.dtype).reshape(entry.shape)


def _scanned(file: BinaryIO, record: FileRecord) -> dict[str, _TensorRecord]:
    """Read a whole file once, hash it, and return the place and the CRC of each tensor.

    Raises:
        ValueError, KeyError: the bytes are not those of the record, or not a safetensors file.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_CHUNK, max(record.num_bytes, 8))))

    def pieces(num_bytes: int) -> Iterator[memoryview]:
        for start in range(0, num_bytes, _CHUNK):
            piece = buffer[: min(_CHUNK, num_bytes - start)]
            if not _filled(file, piece):
                raise ValueError("the file ends before its tensors")
            digest.update(piece)
            yield piece

    length = int.from_bytes(b"".join(map(bytes, pieces(8))), "little")
    if length > min(_MAX_HEADER, record.num_bytes - 8):
        raise ValueError("the header is longer than the file")
    entries = listed(b"".join(map(bytes, pieces(length))), 8 + length, record.num_bytes)
    for name, entry in entries.items():
        crc = 0
        for piece in pieces(entry.num_bytes):
            crc = zlib.crc32(piece, crc)
        entries[name] = entry._replace(crc=crc)
    if file.read(1) or record.sha256 not in ("", digest.hexdigest()):
        raise ValueError("SHA-256 differs")
    return entries


def listed(header: bytes, start: int, end: int) -> dict[str, _TensorRecord]:
    """Return the tensors that a header lists, in the order of their bytes.

    Args:
        header: JSON, without its length.
        start: the first byte after the header.
        end: the bytes of the file.

    Raises:
        ValueError, KeyError: the header is malformed, or the tensors do not fill the bytes after it without a gap.
    """
    content = expect_map(parse_json(header, depth=8), {})
    content.pop("__metadata__", None)
    for entry in content.values():
        expect_map(entry, {"data_offsets": list, "dtype": str, "shape": list})
        entry["data_offsets"] = whole_numbers(entry["data_offsets"])  # no shape: their product may be any number
    entries, offset = dict[str, _TensorRecord](), start
    for name, entry in sorted(content.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        (first, last), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], lengths_in(entry["shape"])
        if start + first != offset or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes of {name} do not follow those before it")
        entries[name] = _TensorRecord(dtype, shape, offset, last - first)
        offset = start + last
    if offset != end:
        raise ValueError("the tensors are not as long as the file")
    return entries


def lengths_in(content: Any) -> tuple[int, ...]:
    """Return a shape or an offset from JSON, if it is valid for a tensor.

    Raises:
        ValueError: it is not a list of non-negative integers, or the numbers are too large for any tensor.

    Example:
        >>> lengths_in([2, 3])
        (2, 3)
    """
    numbers = whole_numbers(content)
    if len(numbers) > _MAX_DIMS or math.prod(max(number, 1) for number in numbers) >= _MAX_NUMEL:
        raise ValueError("a shape or offset is larger than any tensor")
    return tuple(numbers)


def _filled(file: BinaryIO, target: memoryview) -> bool:
    """Read until the target is full; return False if the file ends earlier."""
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]  # FileIO has it
        if not count:
            return False
        done += count
    return True


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over parameters and buffers: little-endian bytes, sorted by canonical names.

    Args:
        tensors: by their names in a checkpoint; only `param/` and `buffer/` count, sorted by the rest of the name.

    Example:
        >>> import torch
        >>> weights_sha256({"param/w": torch.zeros(2), "optimizer/momentum/w": torch.ones(2)})[:8]
        'af5570f5'
    """
    digest = hashlib.sha256()
    for name in sorted(filter(_counts, tensors), key=_canonical):
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def sha256_of_pieces(pieces: ShardedState, all_ranks: Collective) -> str:
    """Return the hash of a sharded state; collective. Memory: one full tensor on each rank."""
    weights = {name: parts for name, parts in pieces.items() if _counts(name)}
    digest = hashlib.sha256()
    for _, tensor in iter_gather_full(weights, all_ranks, order=_canonical):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _counts(name: str) -> bool:
    return name.startswith(("param/", "buffer/"))


def _canonical(name: str) -> tuple[str, str]:
    """Return the sort key of a name: the part after the kind, then the kind."""
    kind, _, rest = name.partition("/")
    return rest, kind


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
    if problems and (OwnershipToken.find(root.parent) is None or (root / "index.json").exists()):
        raise CheckpointError("\n".join(["no checkpoint is undamaged:", *(f"  {problem}" for problem in problems)]))
    for problem in problems:
        report(f"{problem} This run has saved no checkpoint yet: that one stays in its place, and is not used.")
    return None


def note_foreign(root: Path, step: int, report: Callable[[str], None]) -> None:
    """Report the complete checkpoints of other runs that are newer than the step at which a run begins."""
    for _, entry in list_all(root, foreign=True):
        if isinstance(entry, Checkpoint) and entry.step > step:
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
        region = torch.empty(size, dtype=self.dtype)
        for file, key, offset, length in self.pieces:
            ends = zip(bounds, offset, length, strict=True)
            cuts = [(start, first, max(start, first), min(stop, first + long)) for (start, stop), first, long in ends]
            if all(begin < end for *_, begin, end in cuts):
                part = tuple(slice(begin - start, end - start) for start, _, begin, end in cuts)
                region[part] = file.read(key)[tuple(slice(begin - first, end - first) for _, first, begin, end in cuts)]
        return region


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

    def meta_of(self, name: str) -> Tensor:
        """Return a tensor on the meta device, with shape and dtype of a tensor that is not read."""
        return torch.empty(self._entries[name].shape, dtype=self._entries[name].dtype, device="meta")

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Read a region of a tensor from the pieces that overlap it, one after the other.

        Raises:
            CheckpointError: it can no longer be read, or is not what was verified.
        """
        entry = self._entries[name]
        return entry.read([part.indices(length)[:2] for part, length in zip(region, entry.shape, strict=True)])


def _entry(name: str, content: Any, files: Mapping[str, TensorFile]) -> _Stored:
    expect_map(content, {"shape": list, "dtype": str, "pieces": list})
    entries = expect_maps(content["pieces"], {"file": str, "offset": list, "size": list}, optional={"key": str})
    if len(entries) > _MAX_PIECES:
        raise ValueError(f"{name} has {len(entries):,} pieces; the limit is {_MAX_PIECES:,}")
    shape, dtype = lengths_in(content["shape"]), DTYPES[content["dtype"]]
    pieces = tuple(
        _Piece(files[piece["file"]], piece.get("key", name), lengths_in(piece["offset"]), lengths_in(piece["size"]))
        for piece in entries
    )
    if wrong := coverage_error(shape, [(piece.offset, piece.size) for piece in pieces]):
        raise ValueError(f"{name}: {wrong}")
    for piece in pieces:
        if (kind := piece.file.kind_of(piece.key)) != (dtype, piece.size):
            raise ValueError(f"a piece of {name} is {kind}, not {(dtype, piece.size)}")
    return _Stored(dtype, shape, pieces)
