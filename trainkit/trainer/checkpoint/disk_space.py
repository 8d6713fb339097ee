"""Check the free space for checkpoints before the first step and before each save, so that no save fails midway.

A save needs space for a complete checkpoint in addition to the kept ones, since older ones are removed after the new
one is complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.errors import StorageError
from trainkit.storage import Free, file_limit, num_bytes, reason_and_room, remedy_of, storage_error
from trainkit.trainer.manifest import list_complete

_FIXED_BYTES: Final = 32 * 1024
"""Manifest, meta, the two indexes, rounding to blocks, and a few rows of metrics."""
_BYTES_A_TENSOR: Final = 512
"""Size of a tensor's entries in the header of its file and in the index."""
_NUM_FILES: Final = 8
"""Folder, files and temporary names of a checkpoint that one process writes."""
_FEWER: Final = "keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_best)"
_ELSEWHERE: Final = "choose a folder on another file system (hydra.run.dir=FOLDER)"


def bytes_needed(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a checkpoint of these tensors takes on a disk.

    Example:
        >>> import torch
        >>> bytes_needed([torch.zeros(256), torch.zeros(256, dtype=torch.float64)])
        36864
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(sizes) + _BYTES_A_TENSOR * len(sizes) + _FIXED_BYTES


def refuse_lack_of_room(root: Path, step: int, needed: int, *, largest_file: int | None = None, who: str = "") -> None:
    """Refuse to begin a save that does not fit on the file system; writes nothing.

    Args:
        root: the `checkpoints` folder.
        step: the step of the checkpoint.
        needed: bytes of the complete checkpoint.
        largest_file: bytes of its largest file; None: all of them.
        who: which rank writes, if several do.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    if (code := _lacking(root, needed, needed if largest_file is None else largest_file)) is not None:
        raise unwritten(root, step, OSError(code, os.strerror(code)), needed=needed, who=who)


def refuse_small_disk(folder: Path, *, size: int, kept: int, steps_left: int, exported: int = 0) -> None:
    """Refuse a run whose checkpoints do not fit on the file system of its folder, before its first step.

    Args:
        folder: the run folder, which may not exist yet.
        size: bytes of a checkpoint.
        kept: number of checkpoints kept.
        steps_left: at most so many are written.
        exported: bytes of the model that is written at the end.

    Raises:
        StorageError: there is too little space for the kept checkpoints and the one that is written in addition.
    """
    there = list_complete(folder / "checkpoints")
    have = sum(record.num_bytes for checkpoint in there for record in checkpoint.files.values())
    number = min(kept + 1, len(there) + steps_left)
    needed = max(size * number - have, size) + exported
    free = Free.at(folder)
    if _lacking(folder, 0, size) == errno.EFBIG:
        raise storage_error(folder / "checkpoints", OSError(errno.EFBIG, os.strerror(errno.EFBIG)), needed=size)
    if free is None or (free.num_bytes >= needed and free.num_files != 0):
        return
    of = f"{number} checkpoints of {num_bytes(size)}" if number > 1 else f"a checkpoint of {num_bytes(size)}"
    of += f", and {num_bytes(exported)} of the model at the end" if exported else ""
    less = f", less the {num_bytes(have)} of existing ones" if have else ""
    fewer = f", {_FEWER}" if number > 1 else ""
    raise StorageError(
        f"{folder} has too little room for the checkpoints of this run: {num_bytes(needed)} are needed ({of}{less}), "
        f"{free}. Free space there{fewer}, or {_ELSEWHERE}."
    )


def refuse_full(path: Path, needed: int) -> None:
    """Refuse to begin a file that does not fit on its file system; writes nothing.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    if (code := _lacking(path.parent, needed, needed)) is not None:
        raise storage_error(path, OSError(code, os.strerror(code)), needed=needed)


def unwritten(root: Path, step: int, error: OSError, *, needed: int | None = None, who: str = "") -> StorageError:
    """Return the error of a checkpoint that could not be written to the disk.

    Args:
        root: the `checkpoints` folder.
        step: the step of the checkpoint.
        error: the error of the system.
        needed: bytes of the checkpoint, if known.
        who: which rank's part it was, if several write.
    """
    try:
        kept = list_complete(root)
    except OSError:
        kept = []
    last = f"The last complete one is {kept[0].folder}" if kept else "There is no earlier one"
    why = reason_and_room(root, error, needed=needed)
    return StorageError(
        f"the checkpoint of step {step} could not be written below {root}: {who}{why}. {last}. {remedy_of(error)}"
    )


def _lacking(root: Path, needed: int, largest_file: int) -> int | None:
    """Return the error number that a save would raise; None if there is space, or it is unknown."""
    if (limit := file_limit()) is not None and largest_file > limit:
        return errno.EFBIG
    free = Free.at(root)
    if free is None:
        return None
    few_files = free.num_files is not None and free.num_files < _NUM_FILES
    return errno.ENOSPC if free.num_bytes < needed or few_files else None
