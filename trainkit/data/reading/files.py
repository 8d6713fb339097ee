"""Files that a dataset is made of: found, checked against their SHA-256, downloaded only when asked for."""

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

__all__ = ["cache_folder", "digest_of", "download", "existing", "fetch"]

_TIMEOUT_S: Final = 60
_CHUNK: Final = 1 << 20
_REMEDY: Final = "Make room there, or fetch the file by hand and give its place as data.path."


def cache_folder(name: str) -> Path:
    """Where downloads of a dataset are kept: `$XDG_CACHE_HOME/trainkit/NAME`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainkit" / name


def existing(path: Path, *, key: str = "data.path", remedy: str = "") -> Path:
    """The path with `~` expanded, if something is there.

    Raises:
        DataError: there is nothing; the key and the remedy are named.
    """
    found = path.expanduser()
    if not found.exists():
        raise DataError(f"{key}={path}: there is no such file or folder.{' ' if remedy else ''}{remedy}")
    return found


def digest_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, to: Path, *, sha256: str) -> Path:
    """Fetch a file once; what is already there is checked and kept.

    Args:
        url: where it is.
        to: where it goes.
        sha256: of the whole file.

    Raises:
        DataError: it cannot be fetched, or is not the expected file.
    """
    if to.exists():
        _check(to, sha256, origin=str(to))
    else:
        fetch(url, to, accept=lambda part: _check(part, sha256, origin=url))
    return to


def fetch(url: str, to: Path, *, accept: Callable[[Path], object]) -> None:
    """Download a file; it appears under its name only when complete and accepted, so that many may ask at once.

    Args:
        url: where it is.
        to: where it goes.
        accept: looks at the complete file under a temporary name, and raises if it is not the right one.

    Raises:
        DataError: it cannot be fetched, or `accept` says so.
        StorageError: it cannot be written: the file system is full, read-only or too small for it.
    """
    with naming(to.parent, remedy=_REMEDY):
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=to.parent)
    with temporary as folder:
        part = Path(folder) / to.name
        try:
            # The address is a constant of a dataset's class, and `accept` decides what is taken.
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                _copy(answer, part, to)
        except (OSError, HTTPException) as error:
            remedy = "Fetch it by hand and give its place as data.path."
            raise DataError(f"cannot download {url}: {error}. {remedy}") from error
        accept(part)
        with naming(to, remedy=_REMEDY):
            part.replace(to)


def _copy(answer: Any, part: Path, to: Path) -> None:
    """Write an answer to a file, and tell errors of the disk from those of the connection.

    Raises:
        StorageError: the file system of `to` has too little room, or refuses.
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
                if written < len(content):  # the rest meets the error itself
                    file.write(content[written:])


def _check(path: Path, sha256: str, *, origin: str) -> None:
    found = digest_of(path)
    if found != sha256:
        raise DataError(f"{origin} is not the expected file: its SHA-256 is {found}, expected {sha256}.")
