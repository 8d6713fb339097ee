"""The lock of a run folder, which has one owner at a time, and existing files when a run begins.

The kernel releases the lock when its holders end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from trainkit.bounded import expect_map, parse_json
from trainkit.errors import AbsentFileError, CheckpointError, ConfigError, Problem, UnreadableError
from trainkit.files import open_descriptor, read_bytes, read_map
from trainkit.trainer.cleanup import owner_of
from trainkit.trainer.manifest import list_complete
from trainkit.trainer.ownership import FOLDERS, MARK, OwnershipToken, free_name, print_notice, set_aside

if sys.platform == "win32":  # untested there
    import msvcrt
else:
    import fcntl

_MAX_BYTES: Final = 4096
"""Size limit of the lock file's content."""
_ENDING_S: Final = 5.0
"""Seconds in which children of a killed owner are expected to end."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock file `path` for the duration of the block.

    The lock belongs to the open file, not to the process: a child that inherits the descriptor (`pass_fds`) keeps the
    folder locked until it has ended too, even if its parent was killed. A caller that comes right after the kill waits
    up to 5 s for such children.

    Yields:
        The descriptor, to be passed to the processes that write into the folder.

    Raises:
        ConfigError: another process holds the lock, and the error names it; or the file is not trainkit's.
        UnreadableError: the file is a link, a pipe or otherwise not a regular file.
    """
    problem = _why_foreign(path)
    if problem is not None:
        rule = f"has a {path.name} that is not a lock file of trainkit: {problem}. Rename it, or choose another folder."
        raise ConfigError([Problem(key="run folder", value=str(path.parent), rule=rule)])
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        if not _lock_after_killed_owner(path, descriptor):
            rule = f"in use by {_owner(path)}. Wait for it to end, or stop it."
            raise ConfigError([Problem(key="run folder", value=str(path.parent), rule=rule)])
        _write_owner(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)  # the last copy closed releases the lock


def owner_lives(path: Path) -> bool:
    """Return whether the process that wrote a lock file lives, or is on another host. Does not try the lock itself."""
    try:
        owner = read_map(path, {"host": str, "pid": int}, limit=_MAX_BYTES)
        if owner["host"] != socket.gethostname():
            return True
        os.kill(owner["pid"], 0)
    except PermissionError:  # a process of another user
        return True
    except (OSError, UnreadableError, OverflowError):
        return False
    return True


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
    """Return why a file is not a lock file of trainkit; None if it is one, or absent."""
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


def _lock_after_killed_owner(path: Path, descriptor: int) -> bool:
    """Lock the file; if its owner was killed, wait for the children that inherited the lock and are ending."""
    until = time.monotonic() + _ENDING_S
    while not _try_lock(descriptor):
        if sys.platform == "win32" or time.monotonic() > until or owner_lives(path):
            return False
        time.sleep(0.02)
    return True


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


_FILES: Final = (
    "environment.json",
    "plan.json",
    "report.html",
    "settings.json",
    "result.json",
    "status.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "updates.jsonl",
    "restarts.jsonl",
    "rollbacks.json",
    "sample.txt",
    "train.log",
    ".fence",
    ".attempts",
    ".stop",
    ".reserve",
    "checkpoints/index.json",
    "checkpoints/evaluated.json",
    "plots/*.png",
    "profile/trace.json",
    "profile/operations.txt",
    "tracking/*.json",
)
"""Files that a run replaces, deletes or appends to by name."""


def take_over_folder(path: Path, *, is_run: bool) -> OwnershipToken:
    """Return the owner of a run folder, whose lock is held; create its token if it has none.

    A new folder gets a new token, and existing files with the name of a file of the run are renamed; in the folder of a
    run, the token is read. A run folder without a token began before tokens existed, or was copied without hidden
    files: it gets the token of its checkpoints, or a new one, and valid checkpoints without a token count as its own.

    Raises:
        CheckpointError: the token cannot be read, or the checkpoints are those of several other runs.
        OSError: the file system refuses.
    """
    try:
        owner = OwnershipToken.read(path)
    except UnreadableError as error:
        if is_run:
            raise CheckpointError(
                f"{error} It identifies the checkpoints of this run. Restore the file, or remove it: then the token "
                f"is "
                "taken from the checkpoints."
            ) from None
        set_aside(path / MARK, "was not written by this run")
        owner = None
    if owner is None:
        owner = _recovered(path) if is_run else _new(path)
        owner.mark(path)
    return owner


def _recovered(path: Path) -> OwnershipToken:
    checkpoints = path / "checkpoints"
    found = list_complete(checkpoints)
    owner = owner_of(checkpoints)
    if not found:  # they may be unreadable for a moment
        owner = replace(owner, adopts=True)
    elif not any(owner.wrote(entry.owner) for entry in found):
        raise CheckpointError(
            f"{path} has no token ({MARK}), and its checkpoints carry those of several runs. Copy {MARK} from the "
            f"folder that it was copied from, or start a new run with resume={found[0].folder}"
        )
    return replace(owner, folders=_beside(path, ("live",)))


def _new(path: Path) -> OwnershipToken:
    for pattern in _FILES:
        for taken in sorted(path.glob(pattern)):
            if taken.is_symlink() or not taken.is_file() or taken.stat().st_size:  # Hydra opens an empty log beforehand
                set_aside(taken, "was not written by this run")
    return replace(OwnershipToken.new(), folders=_beside(path, FOLDERS))


def _beside(path: Path, usual: tuple[str, ...]) -> dict[str, str]:
    """Return alternative names for folders of the run whose usual names are in use."""
    taken = {name: free_name(path / name).name for name in usual if os.path.lexists(path / name)}
    for name, instead in taken.items():
        print_notice(
            f"{path / name} was not written by this run: it is left where it is, and {path / instead} is used."
        )
    return taken
