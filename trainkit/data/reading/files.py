"""Files of a dataset: found, checked against their SHA-256, downloaded only on request."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from trainkit.errors import DataError
from trainkit.storage import Free, naming, storage_error

_TIMEOUT_S: Final = 60
_CHUNK: Final = 1 << 20
_REMEDY: Final = "Free space there, or download the file yourself and give its path as data.path."


def existing(path: Path, *, key: str = "data.path", remedy: str = "") -> Path:
    """Return the path with `~` expanded, if it exists.

    Raises:
        DataError: it does not exist; names the key and the remedy.
    """
    found = path.expanduser()
    if not found.exists():
        raise DataError(f"{key}={path}: there is no such file or folder.{' ' if remedy else ''}{remedy}")
    return found


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, to: Path, *, sha256: str) -> Path:
    """Download a file once; an existing file is checked and kept.

    Raises:
        DataError: it cannot be fetched, or is not the expected file.
    """
    if to.exists():
        _check(to, sha256, origin=str(to))
    else:
        fetch(url, to, accept=lambda part: _check(part, sha256, origin=url))
    return to


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
                _copy(answer, part, to)
        except (OSError, HTTPException) as error:
            remedy = "Download it yourself and give its path as data.path."
            raise DataError(f"cannot download {url}: {error}. {remedy}") from error
        accept(part)
        with naming(to, remedy=_REMEDY):
            part.replace(to)


def _copy(answer: Any, part: Path, to: Path) -> None:
    """Write a response to a file; distinguish errors of the disk from errors of the connection.

    Raises:
        StorageError: the file system of `to` is full, or refuses to write.
        OSError: the connection broke.
    """
    length: int | None = getattr(answer, "length", None)
    free = Free.at(to)
    if length is not None and free is not None and free.num_bytes < length:
        raise storage_error(to, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed=length, remedy=_REMEDY)
    with naming(to, needed=length, remedy=_REMEDY):
        file = part.open("wb", buffering=0)
    with file:
        while content := answer.read(_CHUNK):
            with naming(to, needed=length, remedy=_REMEDY):
                written = file.write(content)
                if written < len(content):  # writing the rest raises the error
                    file.write(content[written:])


def _check(path: Path, sha256: str, *, origin: str) -> None:
    found = digest_of(path)
    if found != sha256:
        raise DataError(f"{origin} is not the expected file: its SHA-256 is {found}, expected {sha256}.")
