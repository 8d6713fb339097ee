"""Files of a dataset: found, checked against their SHA-256, downloaded only on request."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Final

from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import Reads, a_file
from trainkit.files import Free, naming, storage_error

_TIMEOUT_S: Final = 60
_CHUNK: Final = 1 << 20
_REMEDY: Final = "Free space there, or download the file yourself and give its path as data.path."


def existing(path: Path, kind: Reads = a_file, *, key: str = "data.path", remedy: str = "") -> Path:
    """Return the path with `~` expanded, if it can be read and is of this kind.

    Raises:
        DataError: it is not; names the key and the remedy.
    """
    if rule := kind.rule(path):
        raise DataError(f"{key}={path}: {rule}{' ' if remedy else ''}{remedy}")
    return path.expanduser()


def text_of(path: Path, encoding: str = "utf-8", *, key: str = "data.path") -> str:
    """Return the text of a file, with its line ends as they are and without a byte order mark.

    Raises:
        DataError: it does not exist, or its bytes are not of this encoding; names the line and the remedy.
    """
    content = existing(path, key=key).read_bytes()
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except LookupError:
        raise ConfigError(
            [Problem(key="data.encoding", value=encoding, rule="Python knows no such encoding.")]
        ) from None
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        line, byte = content.count(b"\n", 0, start) + 1, f"0x{content[start]:02x}" if content else "no byte"
        remedy = "Give its encoding, such as data.encoding=latin-1 or utf-16, or convert the file to UTF-8."
        raise DataError(
            f"{key}={path}: line {line} holds the byte {byte}, which is not {encoding}. {remedy}"
        ) from error


def alike(texts: Iterable[str]) -> list[list[str]]:
    """Return the texts that differ from others only in case, or in blanks at their ends, sorted.

    Example:
        >>> alike(["cat", "dog", "Cat", "cat "])
        [['Cat', 'cat', 'cat ']]
    """
    groups = dict[str, set[str]]()
    for text in texts:
        groups.setdefault(text.strip().casefold(), set()).add(text)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def fetch(url: str, to: Path, *, accept: Callable[[Path], object]) -> None:
    """Download a file; it appears under its name only when complete and accepted, so processes may do this at once.

    Args:
        url: the address.
        to: the destination.
        accept: checks the complete file under a temporary name, and raises if it is not the right one.

    Raises:
        DataError: it cannot be downloaded, or is not accepted.
        StorageError: it cannot be written: the file system is full, read-only or too small for it.
    """
    with naming(to.parent, remedy=_REMEDY):
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=to.parent)
    with temporary as folder:
        part = Path(folder) / to.name
        try:
            # The address is a constant of a dataset's class, and `accept` checks the content.
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                length, free = getattr(answer, "length", None), Free.at(to)
                if length is not None and free is not None and free.num_bytes < length:
                    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    raise storage_error(to, full, needed=length, remedy=_REMEDY)
                with naming(to, needed=length, remedy=_REMEDY):  # of the disk, and not of the connection
                    file = part.open("wb", buffering=0)
                with file:
                    while content := answer.read(_CHUNK):
                        with naming(to, needed=length, remedy=_REMEDY):
                            written = file.write(content)
                            if written < len(content):  # writing the rest raises the error
                                file.write(content[written:])
        except (OSError, HTTPException) as error:
            remedy = "Download it yourself and give its path as data.path."
            raise DataError(f"cannot download {url}: {error}. {remedy}") from error
        accept(part)
        with naming(to, remedy=_REMEDY):
            part.replace(to)


def check(path: Path, sha256: str, *, origin: object) -> None:
    """Compare the SHA-256 of a file.

    Raises:
        DataError: it is not the expected file.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise DataError(f"{origin} is not the expected file: its SHA-256 is {actual}, expected {sha256}.")
