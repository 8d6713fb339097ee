"""Files that a dataset is made of: found, checked against their SHA-256, downloaded only when asked for."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainkit.errors import DataError

__all__ = ["cache_folder", "digest_of", "download", "existing", "fetch"]

_TIMEOUT_S: Final = 60


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
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        part = Path(folder) / to.name
        try:
            # The address is a constant of a dataset's class, and `accept` decides what is taken.
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:  # noqa: S310
                shutil.copyfileobj(answer, file)
        except OSError as error:
            remedy = "Fetch it by hand and give its place as data.path."
            raise DataError(f"cannot download {url}: {error}. {remedy}") from error
        accept(part)
        part.replace(to)


def _check(path: Path, sha256: str, *, origin: str) -> None:
    found = digest_of(path)
    if found != sha256:
        raise DataError(f"{origin} is not the expected file: its SHA-256 is {found}, expected {sha256}.")
