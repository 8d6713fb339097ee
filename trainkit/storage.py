"""Files that cannot be written: which errors of the system mean that, and what the user can do about each.

An `OSError` of a write says neither which file it was about, nor how much room there is, nor what to do. This module
makes a `StorageError` of it, which says all three and ends the command with exit code 4.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainkit.errors import StorageError

if sys.platform != "win32":
    import resource

__all__ = [
    "Free",
    "Presence",
    "as_storage_error",
    "file_limit",
    "naming",
    "num_bytes",
    "reason_and_room",
    "refuse_unwritable",
    "remedy_of",
    "reporting",
    "storage_error",
    "sync_folder",
]

_ELSEWHERE: Final = "or choose a folder on another file system (hydra.run.dir=FOLDER)"
_GONE: Final = f"It was removed, renamed or unmounted. Restore it, {_ELSEWHERE}."
_DENIED: Final = f"Change its permissions, {_ELSEWHERE}."
_DEVICE: Final = f"The storage device or its connection failed: check it (dmesg), {_ELSEWHERE}."
_REMEDIES: Final = {
    errno.ENOSPC: f"Free space there, {_ELSEWHERE}.",
    errno.EDQUOT: f"Delete files there, ask for a larger quota, {_ELSEWHERE}.",
    errno.EFBIG: "Raise the limit of the size of a file (ulimit -f), or lower the size of the model.",
    errno.EROFS: f"Mount the file system writable, {_ELSEWHERE}.",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.ENOTCONN: _GONE,
    errno.EIO: _DEVICE,
    errno.ENODEV: _DEVICE,
    errno.ENXIO: _DEVICE,
}
_ALWAYS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Errors that only a write meets: they are about storage wherever they come from."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES: Final = 4096
_LITTLE_BYTES: Final = 64 * 1024
"""A file system with less room than this counts as full."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - asked for its room
"""Where Linux keeps the memory that the workers of a loader share with their parent."""
_MORE_SHARED_MEMORY: Final = (
    "Free space there, enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), "
    "or lower loader.num_workers."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """The room that a file system has left for this user."""

    num_bytes: int
    num_files: int | None
    """Files and folders that can still be made; None where the file system sets no number."""

    @classmethod
    def at(cls, path: Path) -> Free | None:
        """Return the room of the file system that a path is on, or would be on; None where it does not say."""
        if not hasattr(os, "statvfs"):
            return None
        for place in (path, *path.absolute().parents):
            try:
                found = os.statvfs(place)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            if found.f_blocks == 0:  # some network file systems answer zeros
                return None
            files = found.f_favail if found.f_files else None
            return cls(num_bytes=found.f_bavail * found.f_frsize, num_files=files)
        return None

    def __str__(self) -> str:
        text = f"{num_bytes(self.num_bytes)} are free on its file system"
        return f"{text}, and it can hold no more files (inodes)" if self.num_files == 0 else text


def num_bytes(number: int) -> str:
    """Return bytes in the unit that suits them, 1 KiB = 1024.

    Example:
        >>> num_bytes(0), num_bytes(2048), num_bytes(3 << 29)
        ('0 B', '2 KiB', '1.5 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = max(0, min(len(units) - 1, (number.bit_length() - 1) // 10))
    return f"{number / (1 << 10 * place):.3g} {units[place]}"


def storage_error(path: Path, error: OSError, *, needed: int | None = None, remedy: str = "") -> StorageError:
    """Return the error of a path that cannot be written.

    Args:
        path: the file or folder.
        error: what the system said.
        needed: bytes that were to be written, where that is known.
        remedy: what the user can do; "": what helps for the folder of a run.
    """
    remedy = remedy or (_MORE_SHARED_MEMORY if path == SHARED_MEMORY else remedy_of(error))
    return StorageError(f"{path} cannot be written: {reason_and_room(path, error, needed=needed)}. {remedy}")


def reason_and_room(path: Path, error: OSError, *, needed: int | None = None) -> str:
    """Return what the system said, with the bytes that are needed and free where they matter; arguments as above."""
    facts = [f"{num_bytes(needed)} are needed"] if needed is not None else []
    if error.errno in _FULL and (free := Free.at(path)) is not None:
        facts.append(str(free))
    if error.errno == errno.EFBIG and (limit := file_limit()) is not None:
        facts.append(f"a file may have {num_bytes(limit)}")
    reason = error.strerror or str(error)
    return f"{reason} ({'; '.join(facts)})" if facts else reason


def remedy_of(error: OSError) -> str:
    """Return what the user can do about an error of the system, as a sentence."""
    return _REMEDIES.get(error.errno or 0, f"Check the folder, {_ELSEWHERE}.")


def file_limit() -> int | None:
    """Return the largest size that a file of this process may have (`ulimit -f`); None where there is no limit."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def as_storage_error(error: BaseException, root: Path) -> StorageError | None:
    """Return the storage error that an exception tells of; None where it is about something else.

    Args:
        error: any exception.
        root: the folder whose files are all written by trainkit: whatever the system refuses there counts.
    """
    if isinstance(error, StorageError):
        return error
    if not isinstance(error, OSError) or isinstance(error, ConnectionError):
        return None
    path = _path_of(error)
    inside = path is not None and path.is_relative_to(root.absolute())
    if not inside and error.errno not in _ALWAYS:
        return None
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not root.exists():
        path = root
    path = path or _full_place(root)
    return storage_error(path, error) if path is not None else _unnamed(error)


def _full_place(root: Path) -> Path | None:
    """Return the folder that has no room left, of those that a run writes to; None where none of them is full."""
    for place in (root, SHARED_MEMORY, Path(os.environ.get("TMPDIR", "/tmp"))):  # noqa: S108 - asked for its room
        free = Free.at(place)
        if free is not None and (free.num_bytes < _LITTLE_BYTES or free.num_files == 0):
            return place
    return None


def _unnamed(error: OSError) -> StorageError:
    """Return the error of a file whose name the system did not tell, with the line of code that wrote it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return StorageError(f"a file cannot be written{where}: {error.strerror}. {remedy_of(error)}")


def _path_of(error: OSError) -> Path | None:
    """Return the file that an error names; where it names two, as of a rename, the second, which was to be made."""
    name = error.filename2 if error.filename2 is not None else error.filename
    return Path(os.fsdecode(name)).absolute() if isinstance(name, str | bytes) else None


@contextlib.contextmanager
def reporting(root: Path) -> Iterator[None]:
    """Raise the errors of the system that are about storage as `StorageError`, and all others unchanged.

    Args:
        root: the folder whose files are all written by trainkit.
    """
    try:
        yield
    except OSError as error:
        found = as_storage_error(error, root)
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def naming(path: Path, *, needed: int | None = None, remedy: str = "") -> Iterator[None]:
    """Raise whatever the system refuses in this block as the `StorageError` of one path.

    Args:
        path: what the block writes.
        needed: bytes that it writes, where that is known.
        remedy: what the user can do; "": what helps for the folder of a run.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, needed=needed, remedy=remedy) from error


def refuse_unwritable(folder: Path) -> None:
    """Write a small file into a folder and remove it again.

    Raises:
        StorageError: the folder is gone, full or read-only; says which.
    """
    probe = folder / f".probe.{os.getpid()}"
    with naming(folder, needed=_PROBE_BYTES):
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename or new name in a folder durable; Windows has no such thing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Presence:
    """Notices that the folder of a run is gone: removed, renamed, or its file system unmounted.

    The file `resolved.yaml` stands for the folder, since every run has it from its begin to its end; where there is
    none, the folder stands for itself. An inode would not do: some network file systems number theirs anew.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        marker = folder / "resolved.yaml"
        self._folder, self._marker = folder, marker if marker.exists() else folder

    def check(self) -> None:
        """Look whether the folder is still there.

        Raises:
            StorageError: it is not. A file system that does not answer now is no reason.
        """
        try:
            self._marker.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"the run folder {self._folder} is gone: it was removed, renamed or unmounted while the run used it. "
                "Nothing more can be saved there. Restore it and resume it, or start again."
            ) from None
        except OSError:
            return
