"""Check the free space before each save, so that no save fails midway.

A save needs space for a complete checkpoint in addition to the kept ones, since older ones are removed after the new
one is complete.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.errors import StorageError
from trainkit.storage import lacking, reason_and_room, remedy_of
from trainkit.trainer.manifest import list_complete


def refuse_lack_of_room(root: Path, step: int, needed: int, *, largest_file: int | None = None, who: str = "") -> None:
    """Refuse to begin a save that does not fit on the file system; no file is written.

    Args:
        root: the `checkpoints` folder.
        step: the step of the checkpoint.
        needed: bytes of the complete checkpoint.
        largest_file: bytes of its largest file; None: all of them.
        who: the rank that writes, if several do.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    if (code := lacking(root, needed, needed if largest_file is None else largest_file)) is not None:
        raise unwritten(root, step, OSError(code, os.strerror(code)), needed=needed, who=who)


def unwritten(root: Path, step: int, error: OSError, *, needed: int | None = None, who: str = "") -> StorageError:
    """Return the error of a checkpoint that could not be written to the disk.

    Args:
        root: the `checkpoints` folder.
        step: the step of the checkpoint.
        error: the error of the system.
        needed: bytes of the checkpoint, if known.
        who: the rank whose part it was, if several write.
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
