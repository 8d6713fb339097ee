"""The rows of a prediction on disk: parts, from which an interrupted prediction continues, and the file of all.

A part has its final name only once it is complete. Chunk i holds the same rows on any number of ranks. The complete
file is written in one pass, with the ids of its rows: .npy, .jsonl or .parquet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import ConfigError, DataError, MissingExtraError, Problem, UnreadableError
from trainkit.files import json_value, naming, open_regular, replacing, sync_folder

_BATCHES: Final = 16
"""Number of batches in a chunk."""
_NAME: Final = re.compile(r"part_(\d{8})\.npy")


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The rows of a dataset in chunks of whole batches.

    Example:
        >>> chunks = Chunks(num_rows=100, batch_size=3)
        >>> chunks.count, chunks.rows_of(2), chunks.batches_of(2)
        (3, 4, [96, 99])
    """

    num_rows: int
    batch_size: int

    @property
    def count(self) -> int:
        """Number of chunks; an empty dataset has none."""
        return -(-self.num_rows // (_BATCHES * self.batch_size))

    def batches_of(self, chunk: int) -> list[int]:
        """Return the first row of each batch of a chunk."""
        start = chunk * _BATCHES * self.batch_size
        stop = min(start + _BATCHES * self.batch_size, self.num_rows)
        return list(range(start, stop, self.batch_size))

    def rows_of(self, chunk: int) -> int:
        """Return the number of rows of a chunk."""
        size = _BATCHES * self.batch_size
        return min(size, self.num_rows - chunk * size)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The folder of the parts."""

    folder: Path
    chunks: Chunks

    def file(self, chunk: int) -> Path:
        """Return the file of a chunk."""
        return self.folder / f"part_{chunk:08d}.npy"

    def done(self) -> list[int]:
        """Return the chunks that are complete; a damaged part counts as absent and is written again."""
        numbers = (int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208 - a million names
        return sorted(one for one in numbers if one < self.chunks.count and self._is_whole(one))

    def num_rows_done(self) -> int:
        """Return the rows of all parts that have their final name."""
        numbers = (int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208 - as above
        return sum(self.chunks.rows_of(one) for one in numbers if one < self.chunks.count)

    def _is_whole(self, chunk: int) -> bool:
        try:
            with open_regular(self.file(chunk), "rb") as file:
                shape, dtype, offset = _header(file)
                size = os.fstat(file.fileno()).st_size
        except (OSError, ValueError, UnreadableError):
            return False
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return bool(shape) and shape[0] == self.chunks.rows_of(chunk) and size == offset + num_bytes

    def layout(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape of a row and the dtype, which all parts share.

        Raises:
            DataError: parts differ in the shape of their rows.
        """
        found: dict[tuple[tuple[int, ...], np.dtype[Any]], int] = {}
        for chunk in range(self.chunks.count):
            with open_regular(self.file(chunk), "rb") as file:
                shape, dtype, _ = _header(file)
            found.setdefault((shape[1:], dtype), chunk)
        if len(found) > 1:
            (first, _), (other, chunk) = list(found)[0], list(found.items())[1]  # noqa: RUF015 - two of them
            raise uneven_rows(first, other[0], self.chunks.batches_of(chunk)[0])
        return next(iter(found), ((), np.dtype(np.float32)))

    @contextmanager
    def writing(self, chunk: int) -> Iterator[PartWriter]:
        """Write a part batch by batch; it gets its final name at the end of the block."""
        temporary = self.folder / f".part_{chunk:08d}.{os.getpid()}"
        try:
            with naming(self.file(chunk)):
                with temporary.open("wb") as file:
                    yield PartWriter(file, self.chunks.rows_of(chunk), first_row=self.chunks.batches_of(chunk)[0])
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.file(chunk))
                sync_folder(self.folder)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def contents(self) -> Iterator[NDArray[Any]]:
        """Yield the rows of one batch after another, in the order of the dataset; memory holds one batch."""
        for chunk in range(self.chunks.count):
            with open_regular(self.file(chunk), "rb") as file:
                shape, dtype, _ = _header(file)
                for start in range(0, shape[0], self.chunks.batch_size):
                    rows = min(self.chunks.batch_size, shape[0] - start)
                    block = file.read(rows * dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64)))
                    yield np.frombuffer(block, dtype=dtype).reshape(rows, *shape[1:])

    def remove(self) -> None:
        """Delete the parts, complete and incomplete ones."""
        for name in os.listdir(self.folder):  # noqa: PTH208 - as above
            if _NAME.fullmatch(name) or re.fullmatch(r"\.part_\d{8}\.\d+", name):
                (self.folder / name).unlink(missing_ok=True)


class PartWriter:
    """Appends the rows of batches to the file of a part."""

    def __init__(self, file: IO[bytes], num_rows: int, *, first_row: int) -> None:
        self._file, self._num_rows, self._row = file, num_rows, first_row
        self._layout: tuple[tuple[int, ...], np.dtype[Any]] | None = None

    def append(self, rows: NDArray[Any]) -> None:
        """Append the rows of a batch.

        Raises:
            DataError: their shape differs from that of the previous rows.
        """
        layout = (rows.shape[1:], rows.dtype)
        if self._layout is None:
            self._layout = layout
            write_header(self._file, (self._num_rows, *rows.shape[1:]), rows.dtype)
        elif layout != self._layout:
            raise uneven_rows(self._layout[0], layout[0], self._row)
        self._file.write(np.ascontiguousarray(rows).data)
        self._row += len(rows)


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Write the header of a .npy file."""
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Read the header of a .npy file: shape, dtype, and the offset of the data."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a part")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("not a part")
    return shape, dtype, file.tell()


def uneven_rows(first: Sequence[int], other: Sequence[int], row: int) -> DataError:
    """Return the error of samples whose outputs differ in shape, from the sample `row` on."""
    return DataError(
        f"the outputs of a sample have the shape {tuple(first)} at the beginning, and {tuple(other)} from sample "
        f"{row} "
        "on. Pad the samples to one length, or ask for predict.outputs=classes of a model with one class per sample."
    )


Id = int | str
"""Name of a row: its index in the dataset, or the id that the dataset gives."""
_ELSEWHERE: Final = "Free space there, or name a file on another file system: --out."


def format_of(path: Path) -> str:
    """Return the format of a file, by its ending.

    Raises:
        ConfigError: there is no such format.
        MissingExtraError: its package is not installed.

    Example:
        >>> format_of(Path("scores.npy"))
        'npy'
    """
    found = path.suffix.removeprefix(".")
    if found not in _WRITERS:
        rule = "must end in .parquet, .npy or .jsonl."
        raise ConfigError([Problem(key="--out", value=str(path), rule=rule, origin="command line")])
    if found == "parquet":
        _pyarrow()
    return found


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files that a prediction writes: for .npy, also the file with the ids.

    Example:
        >>> [file.name for file in files_of(Path("scores.npy"))]
        ['scores.npy', 'scores.ids.npy']
    """
    return (path, path.with_suffix(".ids.npy")) if path.suffix == ".npy" else (path,)


def ids_of(dataset: Any) -> Iterator[Id]:
    """Yield the id of every row in order: `ids` of the dataset, or else the indices 0, 1, ... ...

    Example:
        >>> list(ids_of(["a", "b"]))
        [0, 1]
    """
    own = getattr(dataset, "ids", None)
    if own is None:
        yield from range(len(dataset))
        return
    for value in islice(own, len(dataset)):
        yield value if isinstance(value, str) else int(value)


def write_rows(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], *, name: str) -> None:
    """Merge all parts into the files of a prediction, which appear under their names only when complete.

    Args:
        path: the file; its ending gives the format.
        parts: the complete parts.
        ids: iterates the ids of the rows from the first on; it may be called twice.
        name: the column of the outputs.

    Raises:
        DataError: parts differ in the shape of their rows.
        StorageError: a file cannot be written.
    """
    _WRITERS[format_of(path)](path, parts, ids, name)
    sync_folder(path.parent)


def _write_npy(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], name: str) -> None:
    del name
    shape, dtype = parts.layout()
    rows = parts.chunks.num_rows
    # Two passes over the ids: the first finds the longest.
    longest = max((len(one) for one in ids() if isinstance(one, str)), default=0)
    kind = np.dtype(f"<U{longest}") if longest else np.dtype(np.int64)
    main, beside = files_of(path)
    with naming(beside, remedy=_ELSEWHERE), replacing(beside) as file:
        write_header(file, (rows,), kind)
        for block in _blocks(ids(), 1 << 16):
            file.write(np.array(block, dtype=kind).tobytes())
    with naming(main, remedy=_ELSEWHERE), replacing(main) as file:
        write_header(file, (rows, *shape), dtype)
        for content in parts.contents():
            file.write(content.tobytes())


def _write_jsonl(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], name: str) -> None:
    named = ids()
    parts.layout()
    with naming(path, remedy=_ELSEWHERE), replacing(path) as file:
        for content in parts.contents():
            rows = zip(islice(named, len(content)), content.tolist(), strict=True)
            lines = (json.dumps({"id": one, name: json_value(row)}, ensure_ascii=False) for one, row in rows)
            file.write("".join(f"{line}\n" for line in lines).encode())


def _write_parquet(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], name: str) -> None:
    pa, parquet = _pyarrow()
    shape, dtype = parts.layout()
    size = int(np.prod(shape, dtype=np.int64))
    scalar = pa.from_numpy_dtype(dtype)
    own = next(ids(), 0)
    fields = [
        ("id", pa.string() if isinstance(own, str) else pa.int64()),
        (name, pa.list_(scalar, size) if shape else scalar),
    ]
    schema = pa.schema(fields, metadata={"shape": json.dumps(list(shape))})
    named = ids()
    with (
        naming(path, remedy=_ELSEWHERE),
        replacing(path) as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for block in _batched(parts.contents(), parts.chunks.rows_of(0) if parts.chunks.count else 1):
            values = pa.array(block.reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(values, size) if shape else values
            keys = pa.array(list(islice(named, len(block))), type=schema.field("id").type)
            writer.write_table(pa.table([keys, column], schema=schema))


def _batched(contents: Iterator[NDArray[Any]], rows: int) -> Iterator[NDArray[Any]]:
    """Yield arrays of `rows` rows, the last one shorter: the row groups of the file."""
    held: list[NDArray[Any]] = []
    for content in contents:
        held.append(content)
        if sum(map(len, held)) >= rows:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def _blocks(values: Iterator[Id], size: int) -> Iterator[list[Id]]:
    while block := list(islice(values, size)):
        yield block


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415 - the same
    except ImportError as error:
        raise MissingExtraError(key="--out", package="pyarrow", extra="parquet") from error
    return pa, parquet


_WRITERS: Final[Mapping[str, Callable[[Path, Parts, Callable[[], Iterator[Id]], str], None]]] = {
    "npy": _write_npy,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
}


def existing_files(path: Path) -> Sequence[Path]:
    """Return which files of a prediction exist already."""
    return [file for file in files_of(path) if os.path.lexists(file)]
