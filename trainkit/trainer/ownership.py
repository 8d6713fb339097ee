"""Own a folder: by a lock while processes use it, and by a token in each folder of a run.

The kernel releases the lock when its holders end. A run deletes and replaces only files with its own token.

    RUN/.owner                     the token of the run; it moves with a copy of the folder
    RUN/live/.owner                the same token in each folder that the run creates and later deletes
    checkpoints/.tmp_step_N/.owner while a checkpoint is written; a complete one has the token in its manifest

A folder without the token of the run is never deleted. A path with the name of a new checkpoint is renamed, and a line
on the terminal names both paths. A file system error while a token is read means "not owned".

Source: docs/decisions/0022-tokens-in-folders.md
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError, ConfigError, Problem, UnreadableError
from trainkit.files import expect_map, open_descriptor, parse_json, read_bytes, read_map, write_atomically

MARK: Final = ".owner"
"""Name of the file that holds the token."""
_MAX_BYTES: Final = 4096
"""Size limit of a token, and of the content of a lock file."""
_ENDING_S: Final = 5.0
"""Seconds in which children of a killed owner are expected to end."""
_TOKEN: Final = re.compile(r"[0-9a-f]{32}")


def uncontested() -> None:
    """Do nothing: the check for a folder that no other group can take over."""


@dataclass(frozen=True, kw_only=True)
class OwnershipToken:
    """The identity of a run in the folders that it creates.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> run, other = OwnershipToken(), OwnershipToken()
        >>> run.make(root / "live")
        >>> run.owns(root / "live"), other.owns(root / "live")
        (True, False)
    """

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """32 hexadecimal digits, generated once for a run."""

    @classmethod
    def read(cls, folder: Path) -> OwnershipToken | None:
        """Read the token in a folder; None if there is no such file.

        Raises:
            UnreadableError: the file cannot be read, or holds no token.
        """
        path = folder / MARK
        try:
            token = read_map(path, {"token": str}, limit=_MAX_BYTES)["token"]
        except AbsentFileError:
            return None
        if not _TOKEN.fullmatch(token):
            raise UnreadableError(path, "it holds no token of a run")
        return cls(token=token)

    @classmethod
    def find(cls, folder: Path) -> OwnershipToken | None:
        """Read the token in a folder; None if there is no readable one."""
        try:
            return cls.read(folder)
        except UnreadableError:
            return None

    def mark(self, folder: Path, *, sync: bool = True) -> None:
        """Write the token into a folder, flushed to the disk; a kill leaves either the complete file or none.

        Without `sync`, for a folder that is soon deleted or gets its final name, a crash of the machine may lose it.

        Raises:
            OSError: the file system refuses.
        """
        write_atomically(folder / MARK, json.dumps(asdict(self)), sync=sync)

    def make(self, folder: Path) -> None:
        """Create a folder with the token.

        Raises:
            OSError: the file system refuses, or the name is taken; nothing is left.
        """
        folder.mkdir()
        try:
            self.mark(folder, sync=False)
        except OSError:
            folder.rmdir()
            raise

    def owns(self, folder: Path) -> bool:
        """Return whether a path is a folder, not a link to one, with the token of this run."""
        mark = OwnershipToken.find(folder) if _is_folder(folder) else None
        return mark is not None and mark.token == self.token

    def remove(self, folder: Path, written: re.Pattern[str], *, proven: bool = False) -> list[str]:
        """Delete a folder with the token; files in it that the run did not write are kept.

        The token is deleted last: after a kill or an error, the next call deletes the rest.

        Args:
            folder: deleted if this run owns it, else not changed.
            written: names of the files that the run writes there.
            proven: whether the caller knows from the manifest that this run created the folder.

        Returns:
            The names of other files in the folder; if there are any, it stays with them.
        """
        if not (self.owns(folder) or (proven and _is_folder(folder))):
            return []
        try:
            for path in folder.iterdir():
                if written.fullmatch(path.name) and not _is_folder(path):
                    path.unlink()
            foreign = sorted(path.name for path in folder.iterdir() if path.name != MARK)
            if not foreign:
                (folder / MARK).unlink(missing_ok=True)
                folder.rmdir()
        except OSError:
            return []
        return foreign

    def remove_tree(self, folder: Path) -> None:
        """Delete a folder with the token and all its content, written by programs that the run has started."""
        if self.owns(folder):
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a path to `NAME.aside`, `NAME.aside-2` ... and print both paths on the terminal; return the new one.

    A symbolic link itself is renamed; its target is not touched.

    Args:
        path: an existing path.
        why: completes the sentence "PATH ...", for example "was not written by this run".

    Raises:
        OSError: the file system refuses.
    """
    target = free_name(path.with_name(f"{path.name}.aside"))
    path.rename(target)
    print_notice(f"{path} {why}: renamed to {target}.")
    return target


def free_name(path: Path, taken: Iterable[Path] = ()) -> Path:
    """Return the path, or the path with -2, -3 ...: the first that is not taken and does not exist, not even as a
    broken link.
    """
    others = set(taken)
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if name not in others and not os.path.lexists(name))


def new_folder(path: Path) -> Path:
    """Create a folder with the first free name, as `free_name`, and return it; concurrent processes create different
    ones.
    """
    while True:
        folder = free_name(path)
        with suppress(FileExistsError):  # another process has taken this name meanwhile
            folder.mkdir(parents=True)
            return folder


def print_notice(line: str) -> None:
    """Print a line on the terminal."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114 - pathlib may raise


@contextmanager
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

    def refusal(rule: str) -> ConfigError:
        return ConfigError([Problem(key="run folder", value=str(path.parent), rule=rule)])

    try:
        _holder(path)
    except ValueError as error:
        rule = f"has a {path.name} that is not a lock file of trainkit: {error}. Rename it, or choose another folder."
        raise refusal(rule) from None
    descriptor = open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        if not lock_within(descriptor, _ENDING_S, unless=lambda: owner_lives(path)):
            try:
                holder = _holder(path) or {}
                owner = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
            except (UnreadableError, ValueError, KeyError):  # between acquiring the lock and writing the owner
                owner = "another process"
            raise refusal(f"in use by {owner}. Wait for it to end, or stop it.")
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.truncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0
        )
        yield descriptor
    finally:
        os.close(descriptor)  # the last copy closed releases the lock


def owner_lives(path: Path) -> bool:
    """Return whether the process that wrote a lock file lives, or is on another host. Does not try the lock itself."""
    try:
        owner = _holder(path)
        if owner is not None and owner["host"] == socket.gethostname():
            os.kill(owner["pid"], 0)
    except PermissionError:  # a process of another user
        return True
    except (OSError, UnreadableError, ValueError, OverflowError):
        return False
    return owner is not None


def discard_lock(path: Path) -> None:
    """Delete the lock file of a run that was killed before it began, unless it is held or not trainkit's."""
    try:
        _holder(path)
        descriptor = open_descriptor(path, os.O_RDWR)
    except (UnreadableError, ValueError):
        return
    try:
        if lock_within(descriptor, 0):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _holder(path: Path) -> dict[str, Any] | None:
    """Return the content of a lock file; None if it is absent, or empty, as it is until the first lock.

    Raises:
        ValueError: the file is not a lock file of trainkit.
        UnreadableError: it is not a regular file.
    """
    try:
        content = read_bytes(path, limit=_MAX_BYTES)
    except AbsentFileError:
        return None
    return expect_map(parse_json(content), {"pid": int, "host": str, "since": str}) if content else None


def lock_within(descriptor: int, seconds: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Lock an open file, and return whether it is locked; wait for another holder as long as `unless` returns False."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline or unless():
            return False
        time.sleep(0.02)
