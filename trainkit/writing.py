"""Write small files as a whole, and find the folder of the user's caches."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.storage import sync_folder


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
