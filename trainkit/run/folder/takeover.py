"""Take over a run folder: its token, and the files that are in the folder when a run begins there.

new folder           a new token; existing files with the name of a file of the run are renamed folder of a run      its
token is read folder without one   of a run that began before tokens existed, or copied without hidden files: the token
is that of its
                     checkpoints, or a new one, and valid checkpoints without a token count as its own
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from trainkit.errors import CheckpointError, UnreadableError
from trainkit.trainer.cleanup import owner_of
from trainkit.trainer.manifest import list_complete
from trainkit.trainer.ownership import FOLDERS, MARK, OwnershipToken, free_name, print_notice, set_aside

__all__ = ["take_over_folder"]

_FILES: Final = (
    "environment.json",
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
)
"""Files that a run replaces, deletes or appends to by name."""


def take_over_folder(path: Path, *, is_run: bool) -> OwnershipToken:
    """Return the owner of a run folder, whose lock is held; create its token if it has none.

    Args:
        path: the run folder.
        is_run: whether a run has begun there before.

    Raises:
        CheckpointError: the token cannot be read, or the checkpoints are those of several other runs.
        OSError: the file system refuses.
    """
    try:
        owner = OwnershipToken.read(path)
    except UnreadableError as error:
        if is_run:
            raise CheckpointError(
                f"{error} It tells which checkpoints are this run's. Restore the file, or remove it: then the token is "
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
    """Return alternative names for the folders of the run whose usual names are taken."""
    taken = {name: free_name(path / name).name for name in usual if os.path.lexists(path / name)}
    for name, instead in taken.items():
        print_notice(
            f"{path / name} was not written by this run: it is left where it is, and {path / instead} is used."
        )
    return taken
