"""Delete checkpoints and temporary folders of saves, only those of the run that saves."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from trainkit.errors import CheckpointError
from trainkit.trainer.manifest import Checkpoint, folder_name, list_all, list_complete, read_manifest, step_of
from trainkit.trainer.ownership import MARK, OwnershipToken, free_name, print_notice, set_aside

_TEMPORARY: Final = ".tmp_"
"""Name prefix of folders that are being written or deleted."""
_OLD: Final = "old_"
_WRITTEN: Final = re.compile(r"rank_\d{5,}\.safetensors|(index|meta|manifest)\.json|\.owner\.\d+")
"""The files of a checkpoint, except its token; a kill may leave the first form of the token, `.owner.PID`."""


def owner_of(root: Path) -> OwnershipToken:
    """Return the run that a `checkpoints` folder belongs to.

    The parent folder holds the token. If it does not, as in a folder with only checkpoints, the token is that of the
    checkpoints, if all belong to one run and training; else a new one, which owns no files.
    """
    owner = OwnershipToken.found(root.parent)
    if owner is not None:
        return owner
    found = list_complete(root)
    tokens = {entry.owner for entry in found}
    adopts, named = None in tokens, tokens - {None}
    if len(named) == 1 and len({entry.fingerprint for entry in found}) == 1:
        return OwnershipToken(token=str(named.pop()), adopts=adopts)
    return OwnershipToken.new(adopts=adopts)


def temporary_folder_of(root: Path, step: int) -> Path:
    """Return the name of a temporary folder for a checkpoint; an existing one of another run is not used."""
    return free_name(root / f"{_TEMPORARY}{folder_name(step)}")


def delete_temporary_folders(root: Path, owner: OwnershipToken) -> None:
    """Delete the temporary folders that earlier, killed attempts of this run have left."""
    for leftover in root.glob(f"{_TEMPORARY}*"):
        delete_temporary_folder(leftover, owner)


def delete_temporary_folder(draft: Path, owner: OwnershipToken) -> None:
    """Delete a temporary folder of this run; files in it that the run did not write are kept."""
    _delete(draft, owner, draft.name.removeprefix(_TEMPORARY).removeprefix(_OLD))


def delete(checkpoint: Checkpoint, owner: OwnershipToken) -> None:
    """Delete a complete checkpoint, if this run wrote it; files in it that the run did not write are kept.

    Raises:
        OSError: the file system refuses; the checkpoint stays.
    """
    if owner.wrote(checkpoint.owner) and not checkpoint.folder.is_symlink():
        _delete(_retired(checkpoint.folder, owner), owner, checkpoint.folder.name, proven=True)


def make_room(final: Path, owner: OwnershipToken | None) -> Path | None:
    """Rename an existing path that has the name of a new checkpoint.

    Returns:
        The temporary folder to delete after the new one is complete, if this run has saved the same step before; None
        if no such path existed, or it was set aside.

    Raises:
        OSError: the file system refuses.
    """
    if not os.path.lexists(final):
        return None
    try:
        if owner is not None and not final.is_symlink() and owner.wrote(read_manifest(final).owner):
            return _retired(final, owner)
    except CheckpointError:
        pass
    set_aside(final, "is in the place of a new checkpoint")
    return None


def _retired(folder: Path, owner: OwnershipToken) -> Path:
    """Rename a checkpoint before it is deleted: a kill during the deletion leaves no folder that looks like a damaged
    checkpoint.
    """
    with contextlib.suppress(OSError):  # on a full disk, deleting matters more than the token
        owner.mark(folder)
    return folder.rename(free_name(folder.with_name(f"{_TEMPORARY}{_OLD}{folder.name}")))


def _delete(folder: Path, owner: OwnershipToken, name: str, *, proven: bool = False) -> None:
    if left := owner.remove(folder, _WRITTEN, proven=proven):
        kept = free_name(folder.with_name(f"{name}.aside"))
        with contextlib.suppress(OSError):
            folder.rename(kept)
            unmark(kept)
            found = ", ".join(left)
            print_notice(f"{kept} holds the files of {name} that this run did not write; {name} is deleted: {found}.")


def unmark(folder: Path) -> None:
    """Remove the token file from a complete checkpoint: its manifest holds the token."""
    with contextlib.suppress(OSError):
        (folder / MARK).unlink()


def set_aside_newer(root: Path, owner: OwnershipToken, *, step: int) -> None:
    """Set aside the checkpoints of this run that are newer than the one just written.

    The run continued from an older checkpoint, because the newer ones were unreadable or damaged. They would displace
    complete ones from the last k, and a resume would treat them as later states of this training.
    """
    for folder, entry in list_all(root):
        if step_of(folder) > step and isinstance(entry, Checkpoint) and owner.wrote(entry.owner):
            set_aside(folder, f"was skipped, and the run has continued to step {step} from an older checkpoint")
