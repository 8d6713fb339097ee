"""Choose the checkpoints to keep, name the last and the best one, and delete what is not kept.

A run deletes only its own checkpoints and temporary folders, and in them only files that it has written.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from trainkit.errors import CheckpointError, UnreadableError
from trainkit.files import read_map, write_atomically
from trainkit.trainer.manifest import Checkpoint, folder_name, list_all, list_complete, read_manifest, step_of
from trainkit.trainer.ownership import MARK, OwnershipToken, free_name, lock_within, print_notice, set_aside

_TEMPORARY: Final = ".tmp_"
"""Name prefix of folders that are being written or deleted."""
_OLD: Final = "old_"
_WRITTEN: Final = re.compile(r"rank_\d{5,}\.safetensors|(index|meta|manifest)\.json|\.{1,2}owner\.\d+")
"""The files of a checkpoint, except its token; a kill may leave the first form of the token, `..owner.PID`."""
_EVALUATED: Final = "evaluated.json"
_LOCK_TIMEOUT_S: Final = 1.0
"""Seconds that the training waits for an evaluator that was stopped while it held the lock."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keeps the newest and the best checkpoints of a run, and deletes its other ones; those of other runs stay.

    Everything is derived from the manifests and the metrics of an evaluator: no other state exists that could disagree
    with the folders.
    """

    keep_last: int | None = None
    """Number of newest checkpoints to keep, at least 1; None keeps all."""
    keep_best: int = 1
    """Number of best checkpoints to keep in addition."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large metric is better."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError("keep_last must be 1 or more: a run without its last checkpoint cannot be resumed")

    def apply(self, root: Path, *, step: int, owner: OwnershipToken) -> None:
        """Delete the other checkpoints after that of `step` is complete, and write the names into `root/index.json`.

        Checkpoints of this run that are newer are set aside: it continued from an older one, because they were
        unreadable or damaged. They would displace complete ones from the last k, and a resume would treat them as later
        states of this training.
        """
        with exclusive(root) as held:
            for folder, entry in list_all(root):
                if step_of(folder) > step and isinstance(entry, Checkpoint) and entry.owner == owner.token:
                    set_aside(folder, f"was skipped, and the run has continued to step {step} from an older checkpoint")
            judged = EvaluatedIndex.read(root)
            newest = [judged.of(entry) for entry in list_complete(root) if entry.owner == owner.token]
            if self.keep_last is not None and held:
                kept = {entry.folder for entry in (*newest[: self.keep_last], *self.ranked(newest)[: self.keep_best])}
                kept |= {entry.folder for entry in newest if entry.folder.name == judged.evaluating}
                for entry in newest:
                    if entry.folder not in kept:
                        delete(entry, owner)
                newest = [entry for entry in newest if entry.folder in kept]
            self._name(root, newest)

    def judge(self, root: Path, judged: EvaluatedIndex) -> None:
        """Write the metrics of an evaluator, and update the name of the best; no checkpoint is deleted."""
        with exclusive(root):
            judged.write(root)
            self._name(root, [judged.of(entry) for entry in list_complete(root)])

    def _name(self, root: Path, newest: list[Checkpoint]) -> None:
        named = {"last": newest, "best": self.ranked(newest)}
        names = {name: entries[0].folder.name if entries else None for name, entries in named.items()}
        write_atomically(root / "index.json", json.dumps(names, indent=2) + "\n", sync=False)

    def ranked(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints with a metric that is a number, best first; of equal ones the earlier is better."""
        sign = -1.0 if self.mode == "max" else 1.0
        judged = [(sign * entry.metric, entry.step, entry) for entry in checkpoints if entry.metric is not None]
        return [entry for value, _, entry in sorted(judged, key=lambda item: item[:2]) if not math.isnan(value)]


@dataclass(frozen=True, kw_only=True)
class EvaluatedIndex:
    """The metrics that a separate evaluator publishes: `checkpoints/evaluated.json`, which only it writes.

        {"evaluating": "step_00001200", "metrics": {"step_00000600": 0.91}}

    Only the process that writes checkpoints removes them. It keeps the one under evaluation, and the best ones by these
    metrics. Both processes hold a lock while they read and change files, so no checkpoint is removed after the
    evaluator has chosen it and before it publishes the choice.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     EvaluatedIndex(metrics={"step_00000002": 0.5}).write(Path(folder))
        ...     EvaluatedIndex.read(Path(folder)).metrics
        {'step_00000002': 0.5}
    """

    evaluating: str | None = None
    """The name of the checkpoint under evaluation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Name of a checkpoint -> its monitored metric."""

    @classmethod
    def read(cls, root: Path) -> EvaluatedIndex:
        """Read the file in a `checkpoints` folder; empty if it is missing or unreadable."""
        try:
            content = read_map(root / _EVALUATED, {"metrics": dict, "evaluating": (str, type(None))})
        except UnreadableError:
            return cls()
        metrics = {name: float(value) for name, value in content["metrics"].items() if isinstance(value, int | float)}
        return cls(evaluating=content["evaluating"], metrics=metrics)

    def write(self, root: Path) -> None:
        """Write the file; a reader sees either the old one or the new one."""
        metrics = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        content = {"evaluating": self.evaluating, "metrics": metrics}
        write_atomically(root / _EVALUATED, json.dumps(content, indent=2) + "\n", sync=False)

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with its metric, if its own manifest has none."""
        if checkpoint.metric is not None:
            return checkpoint
        return replace(checkpoint, metric=self.metrics.get(checkpoint.folder.name))


@contextmanager
def exclusive(root: Path) -> Iterator[bool]:
    """Lock the `checkpoints` folder against the other process that uses it, if any.

    Yields:
        Whether the lock is held; False: the other process holds it, or the file system has no locks.
    """
    if not (root / _EVALUATED).exists():
        yield True
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        yield lock_within(descriptor, _LOCK_TIMEOUT_S)
    finally:
        os.close(descriptor)  # this releases the lock


def owner_of(root: Path) -> OwnershipToken:
    """Return the run that a `checkpoints` folder belongs to.

    The parent folder holds the token. If it does not, as in a folder with only checkpoints, the token is that of the
    checkpoints, if all belong to one run and training; else a new one, which owns no files.
    """
    owner = OwnershipToken.found(root.parent)
    if owner is None:
        written = {(entry.owner, entry.fingerprint) for entry in list_complete(root)}
        token = next(iter(written))[0] if len(written) == 1 else None
        owner = OwnershipToken() if token is None else OwnershipToken(token=token)
    return owner


def new_temporary_folder(root: Path, step: int, owner: OwnershipToken) -> Path:
    """Create the temporary folder of a checkpoint, and delete those that earlier, killed attempts of this run left.

    An existing one of another run is not used.

    Raises:
        OSError: the file system refuses.
    """
    root.mkdir(exist_ok=True)
    for leftover in root.glob(f"{_TEMPORARY}*"):
        delete_temporary_folder(leftover, owner)
    draft = free_name(root / f"{_TEMPORARY}{folder_name(step)}")
    owner.make(draft)
    return draft


def delete_temporary_folder(draft: Path, owner: OwnershipToken) -> None:
    """Delete a temporary folder of this run; files in it that the run did not write are kept."""
    _delete(draft, owner, draft.name.removeprefix(_TEMPORARY).removeprefix(_OLD))


def delete(checkpoint: Checkpoint, owner: OwnershipToken) -> None:
    """Delete a complete checkpoint, if this run wrote it; files in it that the run did not write are kept.

    Raises:
        OSError: the file system refuses; the checkpoint stays.
    """
    if checkpoint.owner == owner.token and not checkpoint.folder.is_symlink():
        _delete(_retired(checkpoint.folder, owner), owner, checkpoint.folder.name, proven=True)


def make_room(final: Path, owner: OwnershipToken) -> Path | None:
    """Rename an existing path that has the name of a new checkpoint.

    Returns:
        The temporary folder to delete after the new one is complete, if this run has saved the same step before; None
        if no such path existed, or it was set aside.

    Raises:
        OSError: the file system refuses.
    """
    if not os.path.lexists(final):
        return None
    with suppress(CheckpointError):
        if not final.is_symlink() and read_manifest(final).owner == owner.token:
            return _retired(final, owner)
    set_aside(final, "is in the place of a new checkpoint")
    return None


def _retired(folder: Path, owner: OwnershipToken) -> Path:
    """Rename a checkpoint before it is deleted: a kill during the deletion leaves no folder that looks like a damaged
    checkpoint.
    """
    with suppress(OSError):  # on a full disk, deleting matters more than the token
        owner.mark(folder)
    return folder.rename(free_name(folder.with_name(f"{_TEMPORARY}{_OLD}{folder.name}")))


def _delete(folder: Path, owner: OwnershipToken, name: str, *, proven: bool = False) -> None:
    if left := owner.remove(folder, _WRITTEN, proven=proven):
        kept = free_name(folder.with_name(f"{name}.aside"))
        with suppress(OSError):
            folder.rename(kept)
            unmark(kept)
            found = ", ".join(left)
            print_notice(f"{kept} holds the files of {name} that this run did not write; {name} is deleted: {found}.")


def unmark(folder: Path) -> None:
    """Remove the token file from a complete checkpoint: its manifest holds the token."""
    with suppress(OSError):
        (folder / MARK).unlink()
