"""The lock of a run folder, which has one user at a time; the kernel releases it when its holders end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from trainkit.bounded_json import expect_map, parse_json
from trainkit.errors import AbsentFileError, ConfigError, Problem, UnreadableError
from trainkit.reading import open_descriptor, read_bytes, read_map

if sys.platform == "win32":  # untested there
    import msvcrt
else:
    import fcntl

__all__ = ["discard_lock", "locked"]

_MAX_BYTES: Final = 4096
"""Size limit of the lock file's content."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock file `path` for the duration of the block.

    The lock belongs to the open file, not to the process: a child that inherits the descriptor (`pass_fds`) keeps the
    folder locked until it has ended too, even if its parent was killed.

    Yields:
        The descriptor, to be passed to the processes that write into the folder.

    Raises:
        ConfigError: another process holds the lock, and the error names it; or the file is not trainkit's.
        UnreadableError: the file is a link, a pipe or otherwise not a regular file.
    """
    problem = _why_foreign(path)
    if problem is not None:
        rule = f"has a {path.name} that is no lock file of trainkit: {problem}. Rename it, or choose another folder."
        raise ConfigError([Problem(key="run folder", value=str(path.parent), rule=rule)])
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _try_lock(descriptor):
            rule = f"in use by {_owner(path)}. Wait for it to end, or stop it."
            raise ConfigError([Problem(key="run folder", value=str(path.parent), rule=rule)])
        _write_owner(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)  # the last copy closed releases the lock


def discard_lock(path: Path) -> None:
    """Delete the lock file of a run that was killed before it began, unless it is held or not trainkit's."""
    try:
        if _why_foreign(path) is not None:
            return
        descriptor = open_descriptor(path, os.O_RDWR)
    except UnreadableError:
        return
    try:
        if _try_lock(descriptor):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _why_foreign(path: Path) -> str | None:
    """Return why a file is no lock file of trainkit; None if it is one, or absent."""
    try:
        content = read_bytes(path, limit=_MAX_BYTES)
    except AbsentFileError:
        return None
    try:
        if content:  # empty until the first lock
            expect_map(parse_json(content), {"pid": int, "host": str, "since": str})
    except ValueError as error:
        return str(error)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_FAR = 1 << 20
"""Windows locks bytes and then forbids reading them: lock one far beyond the content."""


def _write_owner(descriptor: int) -> None:
    signature = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.truncate(descriptor, 0)
    os.write(descriptor, json.dumps(signature).encode())


def _owner(path: Path) -> str:
    try:
        held = read_map(path, {"pid": int, "host": str, "since": str}, limit=_MAX_BYTES)
        return f"process {held['pid']} on {held['host']} since {held['since']}"
    except UnreadableError:  # between acquiring the lock and writing the owner
        return "another process"
