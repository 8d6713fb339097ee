"""Files with a JSON object in each line, on this machine or behind a URL: the source of a stream."""

from __future__ import annotations

import codecs
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from trainkit.errors import ConfigError, DataError, MissingExtraError, Problem
from trainkit.fields import placement, unit
from trainkit.files import parse_json

_REMOTE: Final = re.compile(r"[a-z][a-z0-9+.-]*://")
_LONGEST: Final = 1 << 24
"""Bytes of a line."""
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    r"""Samples from files of JSON lines. An object's numbers and lists of numbers become arrays, a sample is a dict.

    A field whose numbers are whole in the first line of all files is int64, and must be whole in every line; any other
    field of numbers is float32, whether a line writes 1 or 1.0.

    A file is a path, or a URL of any file system that fsspec knows (`s3://`, `gs://`, `https://`, `memory://`). Names
    with `*`, `?` or `[` are patterns; the files that match are sorted.

    Example:
        >>> import json, tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write(json.dumps({"x": [1.0, 2.0], "y": 1}) + "\n")
        ...     file.flush()
        ...     source = JsonLines(path=file.name)
        ...     source.sizes, next(iter(source))["y"]
        ((1,), 1)
    """

    path: Annotated[str | list[str], placement]
    """The files: a path, a URL or a pattern, or a list of them."""
    num_samples: Annotated[list[int] | None, unit("samples")] = None
    """Lines of each file, in the order of the files; null: each process counts them when it first needs them."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate the samples of all files, in their order."""
        for file in self.files:
            yield from self.read(file)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files, in their order.

        Raises:
            ConfigError: a pattern matches no file, or fsspec is needed and not installed.
        """
        patterns = [self.path] if isinstance(self.path, str) else list(self.path)
        return tuple(name for pattern in patterns for name in _matching(pattern))

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Samples of each file."""
        if self.num_samples is None:
            return tuple(sum(1 for _ in _lines(file)) for file in self.files)
        if len(self.num_samples) != len(self.files):
            rule = (
                f"has {len(self.num_samples)} numbers, and there are {len(self.files)} files. Give one for each file."
            )
            raise ConfigError([Problem(key="data.source.num_samples", value=self.num_samples, rule=rule)])
        return tuple(self.num_samples)

    def read(self, file: str) -> Iterator[dict[str, Any]]:
        """Iterate the samples of one file.

        Raises:
            DataError: a line is no JSON object, or the file cannot be read.
        """
        for number, content in _objects(file):
            for name, value in content.items():
                try:
                    content[name] = _array(value, self._kinds.get(name))
                except ValueError as error:
                    raise DataError(f"line {number} of {file}: {name} holds {error}.") from None
            yield content

    @cached_property
    def _kinds(self) -> Mapping[str, str]:
        """Name of each field -> the kind of its numbers in the first line, as NumPy names it."""
        first: dict[str, Any] = next((content for file in self.files for _, content in _objects(file)), {})
        with suppress(ValueError):  # `read` reports its line
            return {name: np.asarray(value).dtype.kind for name, value in first.items() if value != []}
        return {}


def _array(value: Any, first: str | None) -> Any:
    """Return a list of numbers as an array of 32-bit floats or 64-bit whole numbers; anything else as it is.

    Args:
        value: the value of a field.
        first: the kind of the first value of this field.

    Raises:
        ValueError: lists in it differ in length, or it has decimal places and the first value has none.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError("lists of several lengths") from None
    kind = array.dtype.kind if array.size else first
    if (kind, first) == ("f", "i"):
        raise ValueError(
            "decimal places, and the first line of all files has whole numbers there. Write 1.0 there, not 1"
        )
    kind = "f" if (kind, first) == ("i", "f") else kind
    if not isinstance(value, list):
        return float(value) if kind == "f" else value
    dtypes = {"f": np.float32, "i": np.int64, "b": np.bool_}
    return array.astype(dtypes[kind]) if kind in dtypes else value


def _objects(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of the lines of a file.

    Raises:
        DataError: a line is no JSON object, or the file cannot be read.
    """
    for number, line in _lines(file):
        try:
            content = parse_json(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
        except ValueError as error:
            raise DataError(f"line {number} of {file} is not JSON: {error}.") from None
        if not isinstance(content, dict):
            raise DataError(f"line {number} of {file} is not a JSON object.")
        yield number, content


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1."""
    is_remote = _REMOTE.match(file)
    number, rest, is_end = 0, b"", False
    try:
        with _fsspec(file).open(file, "rb").open() if is_remote else Path(file).expanduser().open("rb") as stream:
            while not is_end:  # the files of fsspec have no readline with a limit
                chunk = stream.read(_CHUNK)
                is_end = not chunk
                *lines, rest = (rest + chunk).split(b"\n")
                for line in [*lines, rest] if is_end else lines:
                    number += 1
                    if line.strip():
                        yield number, line
                if len(rest) > _LONGEST:
                    raise DataError(f"a line of {file} is longer than {_LONGEST:,} bytes.")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error


def _matching(pattern: str) -> list[str]:
    """Return the files that a path, URL or pattern names.

    Raises:
        ConfigError: there is none.
    """
    path, has_wildcard, files = Path(pattern).expanduser(), any(sign in pattern for sign in "*?["), [pattern]
    if _REMOTE.match(pattern):
        fsspec = _fsspec(pattern)
        try:
            files = sorted(file.full_name for file in fsspec.open_files(pattern, "rb")) if has_wildcard else files
        except (OSError, ValueError, ImportError) as error:
            rule = f"cannot be read: {error}."
            raise ConfigError([Problem(key="data.source.path", value=pattern, rule=rule)]) from error
    elif has_wildcard:
        files = sorted(map(str, filter(Path.is_file, Path(path.anchor).glob(str(path.relative_to(path.anchor))))))
    if not files or not (_REMOTE.match(pattern) or has_wildcard or path.is_file()):
        raise ConfigError([Problem(key="data.source.path", value=pattern, rule="names no file.")])
    return files


def _fsspec(file: str) -> Any:
    """Return the module fsspec.

    Raises:
        MissingExtraError: fsspec, or a package that it needs for this kind of URL, is not installed.
        ConfigError: the URL combines several file systems.
    """
    if "::" in file:
        rule = "combines file systems (::). Give one URL."
        raise ConfigError([Problem(key="data.source.path", value=file, rule=rule)])
    try:
        fsspec = importlib.import_module("fsspec")
        fsspec.get_filesystem_class(file.partition("://")[0])
    except ModuleNotFoundError:
        raise MissingExtraError(key="data.source.path", package="fsspec", extra="remote") from None
    except (ImportError, ValueError) as error:
        rule = f"fsspec cannot read it: {str(error).rstrip('.')}."
        raise ConfigError([Problem(key="data.source.path", value=file, rule=rule)]) from None
    return fsspec
