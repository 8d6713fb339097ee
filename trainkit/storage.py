"""Errors about files that cannot be written: which system errors these are, and the remedy for each; and checks of free
space before a file is written.

An `OSError` of a write names neither the file, nor the free space, nor a remedy. This module converts it to a
`StorageError`, which names all three and ends the command with exit code 4.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainkit.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor

_ELSEWHERE: Final = "or choose a folder on another file system (hydra.run.dir=FOLDER)"
_GONE: Final = f"It was removed, renamed or unmounted. Restore it, {_ELSEWHERE}."
_DENIED: Final = f"Change its permissions, {_ELSEWHERE}."
_DEVICE: Final = f"The storage device or its connection failed: check it (dmesg), {_ELSEWHERE}."
_REMEDIES: Final = {
    errno.ENOSPC: f"Free space there, {_ELSEWHERE}.",
    errno.EDQUOT: f"Delete files there, request a larger quota, {_ELSEWHERE}.",
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
"""Errors that only writing causes: they are about storage wherever they are raised."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES: Final = 4096
_LITTLE_BYTES: Final = 64 * 1024
"""A file system with less free space than this counts as full."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only its free space is read
"""The folder in which Linux keeps the memory that the workers of a loader share with their parent."""
_MORE_SHARED_MEMORY: Final = (
    "Free space there, enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), "
    "or lower loader.num_workers."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """The free space of a file system for this user."""

    num_bytes: int
    num_files: int | None
    """Number of files and folders that can still be created; None if the file system has no limit."""

    @classmethod
    def at(cls, path: Path) -> Free | None:
        """Return the free space of the file system of a path, existing or not; None if unknown."""
        if not hasattr(os, "statvfs"):
            return None
        for place in (path, *path.absolute().parents):
            try:
                found = os.statvfs(place)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            if found.f_blocks == 0:  # some network file systems report zeros
                return None
            files = found.f_favail if found.f_files else None
            return cls(num_bytes=found.f_bavail * found.f_frsize, num_files=files)
        return None

    def __str__(self) -> str:
        text = f"{num_bytes(self.num_bytes)} are free on its file system"
        return f"{text}, and it can hold no more files (inodes)" if self.num_files == 0 else text


def file_in_the_way(path: Path) -> Path | None:
    """Return the path or the first one above it that exists and is no folder; None if a folder can be made there.

    A link to nothing or to itself exists, and no folder can take its place.
    """
    first = next((place for place in (path, *path.parents) if os.path.lexists(place)), None)
    return None if first is None or os.path.isdir(first) else first  # noqa: PTH112 - pathlib may raise


def quoted(path: Path) -> str:
    r"""Return a path as a text of Python, in double quotes.

    Example:
        >>> print(quoted(Path('my "run"')))
        "my \"run\""
    """
    return json.dumps(str(path), ensure_ascii=False)


def num_bytes(number: int) -> str:
    """Return a number of bytes with a suitable unit, 1 KiB = 1024.

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
        error: the error of the system.
        needed: number of bytes to be written, if known.
        remedy: what the user can do; "": the default for the folder of a run.
    """
    remedy = remedy or (_MORE_SHARED_MEMORY if path == SHARED_MEMORY else remedy_of(error))
    return StorageError(f"{path} cannot be written: {reason_and_room(path, error, needed=needed)}. {remedy}")


def reason_and_room(path: Path, error: OSError, *, needed: int | None = None) -> str:
    """Return the system's reason, with the needed and free bytes if they matter; arguments as above."""
    facts = [f"{num_bytes(needed)} are needed"] if needed is not None else []
    if error.errno in _FULL and (free := Free.at(path)) is not None:
        facts.append(str(free))
    if error.errno == errno.EFBIG and (limit := file_limit()) is not None:
        facts.append(f"a file may have {num_bytes(limit)}")
    reason = error.strerror or str(error)
    return f"{reason} ({'; '.join(facts)})" if facts else reason


def remedy_of(error: OSError) -> str:
    """Return the remedy for an error of the system, as a sentence."""
    return _REMEDIES.get(error.errno or 0, f"Check the folder, {_ELSEWHERE}.")


def file_limit() -> int | None:
    """Return the largest size of a file that this process may write (`ulimit -f`); None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


_FIXED_BYTES: Final = 32 * 1024
"""Manifest, meta, the two indexes of a checkpoint, rounding to blocks, and a few rows of metrics."""
_BYTES_A_TENSOR: Final = 512
"""Size of a tensor's entries in the header of its file and in the index."""
_NUM_FILES: Final = 8
"""Folder, files and temporary names of a checkpoint that one process writes."""


def bytes_needed(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a checkpoint of these tensors takes on a disk.

    Example:
        >>> import torch
        >>> bytes_needed([torch.zeros(256), torch.zeros(256, dtype=torch.float64)])
        36864
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(sizes) + _BYTES_A_TENSOR * len(sizes) + _FIXED_BYTES


def lacking(root: Path, needed: int, largest_file: int) -> int | None:
    """Return the error number that a save would raise; None if there is space, or it is unknown."""
    if (limit := file_limit()) is not None and largest_file > limit:
        return errno.EFBIG
    free = Free.at(root)
    if free is None:
        return None
    few_files = free.num_files is not None and free.num_files < _NUM_FILES
    return errno.ENOSPC if free.num_bytes < needed or few_files else None


def refuse_full(path: Path, needed: int) -> None:
    """Refuse to begin a file that does not fit on its file system; writes nothing.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    if (code := lacking(path.parent, needed, needed)) is not None:
        raise storage_error(path, OSError(code, os.strerror(code)), needed=needed)


def as_storage_error(error: BaseException, root: Path) -> StorageError | None:
    """Return the storage error that caused an exception; None if it has another cause.

    Every error of the system below `root` counts: only trainkit writes there.
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
    """Return the first full folder that a run writes to; None if no such folder is full."""
    for place in (root, SHARED_MEMORY, Path(os.environ.get("TMPDIR", "/tmp"))):  # noqa: S108 - only its free space is read
        free = Free.at(place)
        if free is not None and (free.num_bytes < _LITTLE_BYTES or free.num_files == 0):
            return place
    return None


def _unnamed(error: OSError) -> StorageError:
    """Return the error of a file that the system did not name, with the line of code that wrote it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return StorageError(f"a file cannot be written{where}: {error.strerror}. {remedy_of(error)}")


def _path_of(error: OSError) -> Path | None:
    """Return the file that an error names; of two, as in a rename, the second, which was to be created."""
    name = error.filename2 if error.filename2 is not None else error.filename
    return Path(os.fsdecode(name)).absolute() if isinstance(name, str | bytes) else None


@contextlib.contextmanager
def reporting(root: Path) -> Iterator[None]:
    """Raise errors of the system about storage as `StorageError`, and all others unchanged."""
    try:
        yield
    except OSError as error:
        found = as_storage_error(error, root)
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def naming(path: Path, *, needed: int | None = None, remedy: str = "") -> Iterator[None]:
    """Raise every error of the system in this block as the `StorageError` of one path.

    Args:
        path: the path that the block writes.
        needed: number of bytes that it writes, if known.
        remedy: what the user can do; "": the default for the folder of a run.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, needed=needed, remedy=remedy) from error


def refuse_unwritable(folder: Path) -> None:
    """Write a small file into a folder and remove it again.

    Raises:
        StorageError: the folder is gone, full or read-only; the message states which.
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
    """Make a rename or new name in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Presence:
    """Detects that the folder of a run is gone: removed, renamed, or its file system unmounted.

    It checks the file `resolved.yaml`, which every run has from beginning to end; without it, it checks the folder
    itself. An inode would not be reliable: some network file systems renumber theirs.
    """

    def __init__(self, folder: Path) -> None:
        marker = folder / "resolved.yaml"
        self._folder, self._marker = folder, marker if marker.exists() else folder

    def check(self) -> None:
        """Check that the folder still exists.

        Raises:
            StorageError: it is gone. A file system that does not respond at the moment does not count.
        """
        try:
            self._marker.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"the run folder {self._folder} is gone: it was removed, renamed or unmounted while the run used it. "
                "Nothing can be saved there. Restore it and resume it, or start again."
            ) from None
        except OSError:
            return
