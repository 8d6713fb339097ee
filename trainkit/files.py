"""Read files that another program, or another user, may have written, and write small files as a whole.

Every file of a run folder, of a checkpoint and of a sweep folder is opened here: only regular files of limited size,
never through a symbolic link, and never waiting for the other end of a pipe. `trainkit.bounded` parses JSON.

    content = read_map(folder / "result.json", {"status": str, "seconds": (int, float)})

Every failure to read is an `UnreadableError`, which names the file and the reason. A file that is written is, for a
reader and after a crash, the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from trainkit.bounded import Kind, expect_map, parse_json
from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.storage import storage_error, sync_folder

MAX_BYTES: Final = 16 << 20
"""Default limit of the bytes of a file."""
_MAX_LINE: Final = 1 << 20
"""Largest number of bytes of one line."""
_CHUNK: Final = 1 << 20

_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link, and trainkit follows none inside its own folders"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


Mode = Literal["rb", "ab", "wb"]
_FLAGS: Final[Mapping[Mode, int]] = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "wb": os.O_WRONLY | os.O_CREAT,
}


def open_regular(path: Path, mode: Mode = "rb", *, follow: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a regular file without waiting for the other end of a pipe.

    Args:
        path: the file; created if it is absent and opened for writing.
        mode: read, append, or overwrite.
        follow: whether to follow a symbolic link: for a path that the user named, not for a file inside a folder.
        buffering: as in `open`.

    Raises:
        AbsentFileError: there is no such file.
        UnreadableError: the path is a link, a directory, a pipe, a socket or a device, or cannot be opened.
    """
    descriptor = open_descriptor(path, _FLAGS[mode], follow=follow)
    if mode == "wb":
        os.ftruncate(descriptor, 0)  # not by a flag: anything but a regular file must stay unchanged
    return os.fdopen(descriptor, mode, buffering)


def open_descriptor(path: Path, flags: int, *, follow: bool = False) -> int:
    """Return the descriptor of a regular file; otherwise as `open_regular`.

    Raises:
        StorageError: the file is to be created or written, and the system refuses.
    """
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        # Devices must not even be opened, and Windows opens links: check the file before and after.
        with contextlib.suppress(FileNotFoundError):
            _refuse_irregular(path, path.stat(follow_symlinks=follow).st_mode)
        descriptor = os.open(path, flags, 0o666)  # as in `open`: the umask applies
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, OSError) and flags & os.O_CREAT:
            raise storage_error(path, error) from None
        if isinstance(error, FileNotFoundError):
            raise AbsentFileError(path, "it does not exist") from None
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from None
    try:
        _refuse_irregular(path, os.fstat(descriptor).st_mode)
    except UnreadableError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_irregular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for matches, name in _KINDS if matches(mode)), "not a regular file")
        raise UnreadableError(path, f"it is {kind}")


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        AbsentFileError: there is no such file.
        UnreadableError: the path is a link, a directory, a pipe, a socket or a device, or cannot be inspected.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise AbsentFileError(path, "it does not exist") from None
    except (OSError, ValueError) as error:
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from None
    _refuse_irregular(path, found.st_mode)
    return found.st_size


def refuse_link(folder: Path) -> None:
    """Refuse a path that is a symbolic link or not a folder; accept an absent one.

    Raises:
        UnreadableError: the path does not name a folder.
    """
    try:
        mode = folder.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UnreadableError(folder, getattr(error, "strerror", None) or str(error)) from None
    if not stat.S_ISDIR(mode):
        kind = next((name for matches, name in _KINDS if matches(mode)), "a file, and a folder was expected")
        raise UnreadableError(folder, f"it is {kind}")


def read_bytes(path: Path, *, limit: int = MAX_BYTES, follow: bool = False) -> bytes:
    """Read a whole file.

    Args:
        path: the file.
        limit: largest number of bytes.
        follow: as in `open_regular`.

    Raises:
        UnreadableError: it is not a regular file, or has more bytes.
    """
    with open_regular(path, follow=follow, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UnreadableError(path, f"it has {size:,} bytes, and at most {limit:,} are read")
        content = bytearray()
        try:
            while part := file.read(_CHUNK):
                content += part
                if len(content) > limit:  # the file grows, or reports a wrong size
                    raise UnreadableError(path, f"it has more than {limit:,} bytes")
        except OSError as error:
            raise UnreadableError(path, error.strerror or str(error)) from None
    return bytes(content)


def read_text(path: Path, *, limit: int = MAX_BYTES, follow: bool = False) -> str:
    """Read a whole file of UTF-8 text.

    Raises:
        UnreadableError: it is not a regular file, has more than `limit` bytes, or is not UTF-8.
    """
    content = read_bytes(path, limit=limit, follow=follow)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text (byte {error.start + 1})") from None


def read_json(path: Path, *, limit: int = MAX_BYTES) -> Any:
    """Read a file of JSON.

    Raises:
        UnreadableError: it is not a regular file, has more than `limit` bytes, or `parse_json` refuses it.
    """
    content = read_bytes(path, limit=limit)
    try:
        return parse_json(content)
    except ValueError as error:
        raise UnreadableError(path, str(error)) from None


def read_map(
    path: Path, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None, limit: int = MAX_BYTES
) -> dict[str, Any]:
    """Read a JSON file that contains a map with known keys.

    Args:
        path: the file.
        kinds: key -> the types of its value; further keys are accepted.
        optional: the same for keys that may be absent.
        limit: largest number of bytes of the file.

    Raises:
        UnreadableError: the file cannot be read, a key is missing, or a value has another type.
    """
    content = read_json(path, limit=limit)
    try:
        return expect_map(content, kinds, optional=optional)
    except ValueError as error:
        raise UnreadableError(path, str(error)) from None


def read_lines(path: Path, *, start: int = 0, longest: int = _MAX_LINE) -> Iterator[bytes]:
    """Yield the complete lines of a file with their line breaks; skip a last line without one.

    Args:
        path: the file; it may grow meanwhile.
        start: the byte at which to begin.
        longest: largest number of bytes of a line.

    Raises:
        UnreadableError: it is not a regular file, or a line is longer.
    """
    with open_regular(path) as file:
        file.seek(start)
        while line := file.readline(longest + 1):
            if not line.endswith(b"\n"):
                if len(line) > longest:
                    raise UnreadableError(path, f"a line of it has more than {longest:,} bytes")
                return
            yield line


def read_tail(path: Path, num_bytes: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and whether they are the whole file.

    Raises:
        UnreadableError: it is not a regular file.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read(num_bytes), size <= num_bytes


def write_json_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader, even after a crash, sees either the old file or the new one.

    Numbers that JSON cannot represent (NaN, infinity) become null.
    """
    write_atomically(path, json.dumps(json_value(content), indent=2, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file so that a reader, even after a crash, sees either the old file or the new one.

    The folder must exist: a removed run folder is not created again. On return the file is on the disk; without `sync`,
    for a file that can be made again, a crash of the whole machine may lose it.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: null for NaN and infinity, lists for tuples, text for keys and paths.

    Example:
        >>> json_value({1: (float("nan"), 2.0)})
        {'1': [None, 2.0]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def cache_folder() -> Path:
    """Return trainkit's folder among the user's caches: `$XDG_CACHE_HOME/trainkit`, or `~/.cache/trainkit`.

    A relative XDG_CACHE_HOME is ignored, since it would name another folder in each working folder.

    Raises:
        RuntimeError: the user has no home folder.

    Source: XDG Base Directory Specification 0.8.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "trainkit"
