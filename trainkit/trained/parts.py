"""The rows of a prediction on disk: parts, from which an interrupted prediction continues, and the file of all.

A part has its final name only once it is complete. Chunk i holds the same rows on any number of ranks. The complete
file is written in one pass, with the ids of its rows: .npy, .jsonl or .parquet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from trainkit.errors import ConfigError, DataError, Problem, require_packages
from trainkit.files import json_value, naming, replacing

NO_SPACE: Final = "Free space there, or name a file on another file system: --out."
_BATCHES: Final = 16
"""Number of batches in a chunk."""
_NAME: Final = re.compile(r"part_(\d{8})\.npy")
Ids = Callable[[], Iterator[int | str]]
"""Function that iterates the names of the rows, from the first on: indices, or the ids that the dataset gives."""


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
        return list(range(start, start + self.rows_of(chunk), self.batch_size))

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

    def _written(self) -> list[int]:
        """Return the chunks whose parts have their final name."""
        numbers = (int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208 - a million names
        return sorted(one for one in numbers if one < self.chunks.count)

    def done(self) -> list[int]:
        """Return the chunks that are complete; a damaged part counts as absent and is written again."""
        found = []
        for chunk in self._written():
            with suppress(OSError, ValueError, EOFError):
                if len(self._read(chunk)) == self.chunks.rows_of(chunk):
                    found.append(chunk)
        return found

    def num_rows_done(self) -> int:
        """Return the rows of all parts that have their final name."""
        return sum(map(self.chunks.rows_of, self._written()))

    def _read(self, chunk: int) -> NDArray[Any]:
        """Map a part into memory; its rows are read on access."""
        found: NDArray[Any] = npy.open_memmap(self.file(chunk), mode="r")
        return found

    def layout(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape of a row and the dtype, which all parts share.

        Raises:
            DataError: parts differ in the shape of their rows.
        """
        first: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        for chunk in range(self.chunks.count):
            part = self._read(chunk)
            first = first or (part.shape[1:], part.dtype)
            if (part.shape[1:], part.dtype) != first:
                raise uneven_rows(first[0], part.shape[1:], self.chunks.batches_of(chunk)[0])
        return first or ((), np.dtype(np.float32))

    def write(self, chunk: int, batches: Iterable[NDArray[Any]]) -> None:
        """Write a part batch by batch; it gets its final name when it is complete."""
        with _complete(self.file(chunk)) as file:
            rows = iter(batches)
            first = next(rows)
            _write_header(file, (self.chunks.rows_of(chunk), *first.shape[1:]), first.dtype)
            for block in chain([first], rows):
                file.write(np.ascontiguousarray(block).data)

    def contents(self) -> Iterator[NDArray[Any]]:
        """Yield the rows of one batch after another, in the order of the dataset; memory holds one batch."""
        for chunk in range(self.chunks.count):
            part, size = self._read(chunk), self.chunks.batch_size
            yield from (np.array(part[start : start + size]) for start in range(0, len(part), size))

    def remove(self) -> None:
        """Delete the parts, complete and incomplete ones."""
        for name in os.listdir(self.folder):  # noqa: PTH208 - as above
            if _NAME.fullmatch(name) or re.fullmatch(r"\.part_\d{8}\.npy\.\d+", name):
                (self.folder / name).unlink(missing_ok=True)


@contextmanager
def _complete(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that gets its name only at the end of the block, flushed to the disk."""
    with naming(path, remedy=NO_SPACE), replacing(path) as file:
        yield file


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, described)


def uneven_rows(first: Sequence[int], other: Sequence[int], row: int) -> DataError:
    """Return the error of samples whose outputs differ in shape, from the sample `row` on."""
    return DataError(
        f"the outputs of a sample have the shape {tuple(first)} at the beginning, and {tuple(other)} from sample "
        f"{row} "
        "on. Pad the samples to one length, or ask for predict.outputs=classes of a model with one class per sample."
    )


def check_format(path: Path) -> None:
    """Refuse a file whose ending is that of no format, or of one whose package is not installed.

    Raises:
        ConfigError: it is such a file.
    """
    found = path.suffix.removeprefix(".")
    if found not in _WRITERS:
        rule = "must end in .parquet, .npy or .jsonl."
        raise ConfigError([Problem(key="--out", value=str(path), rule=rule, origin="command line")])
    if found == "parquet":
        require_packages(["pyarrow"], key="--out", extra="parquet")


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files that a prediction writes: for .npy, also the file with the ids.

    Example:
        >>> [file.name for file in files_of(Path("scores.npy"))]
        ['scores.npy', 'scores.ids.npy']
    """
    return (path, path.with_suffix(".ids.npy")) if path.suffix == ".npy" else (path,)


def ids_of(dataset: Any) -> Iterator[int | str]:
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


def write_rows(path: Path, parts: Parts, ids: Ids, *, name: str) -> None:
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
    _WRITERS[path.suffix.removeprefix(".")](path, parts, ids, name)


def _write_npy(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    del name
    shape, dtype = parts.layout()
    rows = parts.chunks.num_rows
    # Two passes over the ids: the first finds the longest.
    longest = max((len(one) for one in ids() if isinstance(one, str)), default=0)
    kind = np.dtype(f"<U{longest}") if longest else np.dtype(np.int64)
    main, beside = files_of(path)
    with _complete(beside) as file:
        _write_header(file, (rows,), kind)
        named = ids()
        while block := list(islice(named, 1 << 16)):
            file.write(np.array(block, dtype=kind).tobytes())
    with _complete(main) as file:
        _write_header(file, (rows, *shape), dtype)
        for content in parts.contents():
            file.write(content.data)


def _write_jsonl(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    named = ids()
    parts.layout()
    with _complete(path) as file:
        for content in parts.contents():
            rows = zip(islice(named, len(content)), content.tolist(), strict=True)
            lines = (json.dumps({"id": one, name: json_value(row)}, ensure_ascii=False) for one, row in rows)
            file.write("".join(f"{line}\n" for line in lines).encode())


def _write_parquet(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    from pyarrow import parquet  # noqa: PLC0415 - the same

    shape, dtype = parts.layout()
    size = int(np.prod(shape, dtype=np.int64))
    scalar = pa.from_numpy_dtype(dtype)
    fields = [
        ("id", pa.string() if isinstance(next(ids(), 0), str) else pa.int64()),
        (name, pa.list_(scalar, size) if shape else scalar),
    ]
    schema = pa.schema(fields, metadata={"shape": json.dumps(list(shape))})
    named, contents = ids(), parts.contents()
    with _complete(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while blocks := list(islice(contents, _BATCHES)):  # a row group a chunk
            block = np.concatenate(blocks)
            values = pa.array(block.reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(values, size) if shape else values
            keys = pa.array(list(islice(named, len(block))), type=schema.field("id").type)
            writer.write_table(pa.table([keys, column], schema=schema))


_WRITERS: Final = {"npy": _write_npy, "jsonl": _write_jsonl, "parquet": _write_parquet}
