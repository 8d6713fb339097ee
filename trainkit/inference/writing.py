"""Write the rows of a prediction with their ids, in one pass: .npy, .jsonl and .parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import ConfigError, MissingExtraError, Problem
from trainkit.files import json_value
from trainkit.inference.parts import Parts, write_header
from trainkit.storage import naming, sync_folder

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


@contextmanager
def _complete(path: Path) -> Iterator[IO[bytes]]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path, remedy=_ELSEWHERE):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_npy(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], name: str) -> None:
    del name
    shape, dtype = parts.layout()
    rows = parts.chunks.num_rows
    # Two passes over the ids: the first finds the longest.
    longest = max((len(one) for one in ids() if isinstance(one, str)), default=0)
    kind = np.dtype(f"<U{longest}") if longest else np.dtype(np.int64)
    main, beside = files_of(path)
    with _complete(beside) as file:
        write_header(file, (rows,), kind)
        for block in _blocks(ids(), 1 << 16):
            file.write(np.array(block, dtype=kind).tobytes())
    with _complete(main) as file:
        write_header(file, (rows, *shape), dtype)
        for content in parts.contents():
            file.write(content.tobytes())


def _write_jsonl(path: Path, parts: Parts, ids: Callable[[], Iterator[Id]], name: str) -> None:
    named = ids()
    parts.layout()
    with _complete(path) as file:
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
    with _complete(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
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
