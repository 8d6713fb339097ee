"""Define a complete checkpoint: a folder with a manifest that holds the size and SHA-256 of each of its files.

    checkpoints/
      step_00001234/
        rank_00000.safetensors   tensors; one file per writing rank
        index.json               tensor name -> shape, dtype, pieces (file, offset, size, and the key in the file if it
                                 differs from the name, because the rank holds several pieces); tied names
        meta.json                state of the trainer: counters, loss scale, ...
        manifest.json            written last
      index.json                 {"last": "step_00001234", "best": null}: names, not copies; derived from the manifests

Reading manifests does not import torch: listing runs and the supervisor's progress checks are cheap.

A run deletes only its own checkpoints and temporary folders, and in them only files that it has written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from trainkit.config.commands import shell_word
from trainkit.config.grammar import setting
from trainkit.errors import AbsentFileError, CheckpointError, UnreadableError
from trainkit.files import (
    Kind,
    expect_map,
    expect_maps,
    naming,
    read_json,
    read_map,
    refuse_link,
    size_of,
    write_atomically,
)
from trainkit.trainer.ownership import MARK, OwnershipToken, free_name, lock_within, print_notice, set_aside

FORMAT: Final = 1
"""Version of the layout; a reader refuses newer versions."""

MANIFEST: Final = "manifest.json"
_FOLDER: Final = re.compile(r"step_([0-9]{8,18})")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_BYTES: Final = 64 << 20
"""Size limit of a manifest, which has about a hundred bytes for each file of the checkpoint."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final[Mapping[str, Kind]] = {
    "step": int,
    "position": object,
    "fingerprint": (str, type(None)),
    "metric": (float, type(None)),
    "files": dict,
}


class NewerFormatError(CheckpointError):
    """A complete checkpoint written by a later version: it must never be skipped in favour of an older one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """The manifest's record of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint, as described by its manifest."""

    folder: Path
    step: int
    """Updates completed."""
    position: Any = None
    """Position of the training, as JSON of the trainer."""
    fingerprint: str | None = None
    """Hash of the maths keys of the run that wrote the checkpoint."""
    metric: float | None = None
    """The monitored metric, if it was known at the save."""
    owner: str | None = None
    """Token of the run that wrote the checkpoint; None if its folder had none."""
    files: Mapping[str, FileRecord]
    """All files except the manifest itself."""


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder.

    Example:
        >>> folder_name(1234)
        'step_00001234'
    """
    return f"step_{step:08d}"


def manifest_bytes(checkpoint: Checkpoint) -> bytes:
    """Return the content of a manifest: JSON with a hash of itself, so that every flipped bit is detected."""
    content = {
        "format": FORMAT,
        "step": checkpoint.step,
        "position": checkpoint.position,
        "fingerprint": checkpoint.fingerprint,
        "metric": checkpoint.metric,
        "files": {
            name: {"bytes": record.num_bytes, "sha256": record.sha256}
            for name, record in sorted(checkpoint.files.items())
        },
        **({} if checkpoint.owner is None else {"owner": checkpoint.owner}),
    }
    content = json.loads(json.dumps(content))  # keys become strings, as in the JSON that a reader hashes
    return json.dumps({**content, "sha256": _own_hash(content)}, indent=2).encode()


def is_checkpoint(name: str) -> bool:
    """Return whether a name is that of a checkpoint's folder, which may be joined to a path.

    Example:
        >>> is_checkpoint("step_00001234"), is_checkpoint("../step_00001234")
        (True, False)
    """
    return _FOLDER.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder.

    Example:
        >>> step_of(Path("checkpoints/step_00001234"))
        1234
    """
    return int(folder.name.removeprefix("step_"))


def read_manifest(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest, and compare the sizes of its files with it.

    Raises:
        CheckpointError: the manifest is missing, damaged or of a newer format, or a file is absent or has another size.
    """
    try:
        content = read_json(folder / MANIFEST, limit=_MAX_BYTES)
    except AbsentFileError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.") from None
    except UnreadableError as error:
        raise damaged(folder, f"{MANIFEST} cannot be read ({error.reason})") from None
    try:
        checkpoint = _parsed(folder, content)
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST} has changed since it was written ({error})") from None
    for name, record in checkpoint.files.items():
        try:
            num_bytes = size_of(folder / name)
        except AbsentFileError:
            raise damaged(folder, f"{name} is absent") from None
        except UnreadableError as error:
            raise damaged(folder, f"{name} cannot be read ({error.reason})") from None
        if num_bytes != record.num_bytes:
            raise damaged(folder, f"{name} has {num_bytes} bytes instead of {record.num_bytes}")
    return checkpoint


def _parsed(folder: Path, content: Any) -> Checkpoint:
    """Return the checkpoint of a manifest; the hash alone does not protect against a crafted one.

    Raises:
        CheckpointError: its format is newer, or it names a file outside of the folder.
        ValueError: it has changed.
    """
    expected = expect_map(content, {}).pop("sha256", None)
    if expected != _own_hash(content):
        raise ValueError("SHA-256 differs")
    number = expect_map(content, {"format": int})["format"]
    if number > FORMAT:
        raise NewerFormatError(
            f"checkpoint {folder} has format {number}; this version of trainkit reads format {FORMAT}."
        )
    expect_map(content, _KEYS, optional={"owner": (str, type(None))})
    if number != FORMAT or content["step"] < 0:
        raise ValueError(f"its format is {number} and its step {content['step']}")
    expect_maps(list(content["files"].values()), {"bytes": int, "sha256": str})
    for name, entry in content["files"].items():
        if not _PLAIN_NAME.fullmatch(name):  # a name is joined to a path: it must not leave the folder
            raise CheckpointError(f"checkpoint {folder} names a file outside itself: {name[:80]!a}.")
        if entry["bytes"] < 0 or not _SHA256.fullmatch(entry["sha256"]):
            raise ValueError(f"it has no size and SHA-256 of {name}")
    files = {name: FileRecord(num_bytes=row["bytes"], sha256=row["sha256"]) for name, row in content["files"].items()}
    facts = {key: content.get(key) for key in ("step", "position", "fingerprint", "metric", "owner")}
    return Checkpoint(folder=folder, files=files, **facts)


def _own_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damaged(folder: Path, reason: str) -> CheckpointError:
    """Return the error of a checkpoint whose content has changed since it was written."""
    return CheckpointError(f"checkpoint {folder} is damaged: {reason}.")


def manifest_below(root: Path, name: str) -> Checkpoint:
    """Read the manifest of a checkpoint in a `checkpoints` folder; its tensors are not verified.

    Raises:
        CheckpointError: as `read_manifest`; or a symbolic link, or the step in the name is not that of the manifest.
    """
    folder = _refuse_unreadable(root) / name
    try:
        refuse_link(folder)
    except UnreadableError as error:
        raise damaged(folder, error.reason) from None
    checkpoint = read_manifest(folder)
    if checkpoint.step != step_of(folder):
        raise damaged(folder, f"its {MANIFEST} is that of step {checkpoint.step}")
    return checkpoint


def _refuse_unreadable(root: Path) -> Path:
    try:
        refuse_link(root)
    except UnreadableError as error:
        raise CheckpointError(f"the checkpoints in {root} cannot be read: {error.reason}.") from None
    return root


def list_all(root: Path, *, foreign: bool = False) -> list[tuple[Path, Checkpoint | CheckpointError]]:
    """Return the checkpoint folders of a run, newest first, complete or not.

    Complete checkpoints of other runs are left out if the folder above `root` has a token (`OwnershipToken`). A folder
    with an unreadable manifest may belong to any run: it is returned with the error. An absent folder has none.

    Args:
        root: the folder of checkpoints.
        foreign: return those of other runs instead.

    Raises:
        CheckpointError: `root` is a symbolic link, or cannot be read.
    """
    owner = OwnershipToken.find(root.parent)
    try:
        _refuse_unreadable(root)
        folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)] if root.exists() else []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {root} cannot be read: {error.strerror or error}.") from None
    entries: list[tuple[Path, Checkpoint | CheckpointError]] = []
    for folder in sorted(folders, key=step_of, reverse=True):
        entry: Checkpoint | CheckpointError
        try:
            entry = manifest_below(root, folder.name)
        except CheckpointError as error:
            entry = error
        if (isinstance(entry, Checkpoint) and owner is not None and entry.owner != owner.token) is foreign:
            entries.append((folder, entry))
    return entries


def list_complete(root: Path) -> list[Checkpoint]:
    """Return the complete checkpoints below `root`, newest first; none if the folder is absent.

    Complete: the manifest is valid and every file has its size. The content is verified when it is loaded.
    """
    return [entry for _, entry in list_all(root) if isinstance(entry, Checkpoint)]


def better(metric: float | None, than: float | None, mode: str) -> bool:
    """Return whether a metric beats another; an absent metric or NaN beats none and is beaten by any number."""
    if metric is None or math.isnan(metric):
        return False
    if than is None or math.isnan(than):
        return True
    return metric > than if mode == "max" else metric < than


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

    def apply(self, root: Path, *, step: int, owner: OwnershipToken) -> None:
        """Delete the other checkpoints after that of `step` is complete, and write the names into `root/index.json`.

        Checkpoints of this run that are newer are set aside: it continued from an older one, because they were
        unreadable or damaged. They would displace complete ones from the last k, and a resume would treat them as later
        states of this training.

        Raises:
            StorageError: the file system refuses; no checkpoint is lost.
        """
        with naming(root), exclusive(root) as has_lock:
            for folder, entry in list_all(root):
                if step_of(folder) > step and isinstance(entry, Checkpoint) and entry.owner == owner.token:
                    set_aside(folder, f"was skipped, and the run has continued to step {step} from an older checkpoint")
            judged = EvaluatedIndex.read(root)
            newest = [judged.of(entry) for entry in list_complete(root) if entry.owner == owner.token]
            if self.keep_last is not None and has_lock:
                keep = {entry.folder for entry in (*newest[: self.keep_last], *self.ranked(newest)[: self.keep_best])}
                keep |= {entry.folder for entry in newest if entry.folder.name == judged.evaluating}
                for entry in newest:
                    if entry.folder not in keep:
                        delete(entry, owner)
                newest = [entry for entry in newest if entry.folder in keep]
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


def named_checkpoints(root: Path) -> dict[str, str | None]:
    """Return the names of the `best` and the `last` checkpoint that `Retention` has written into `root/index.json`.

    Raises:
        UnreadableError: the file holds something else.
    """
    try:
        names = read_map(root / "index.json", {name: (str, type(None)) for name in ("best", "last")})
    except AbsentFileError:
        names = {}
    folders = {name: names.get(name) or "" for name in ("best", "last")}
    return {name: folder if is_checkpoint(folder) else None for name, folder in folders.items()}


def owner_of_run(run: Path) -> OwnershipToken:
    """Return the owner of the folder of a run that has begun.

    Raises:
        CheckpointError: its token is absent or cannot be read: no run writes there.
    """
    problem = f"{run} has no token ({MARK}), as a copy without hidden files"
    with naming(run):
        try:
            if (owner := OwnershipToken.read(run)) is not None:
                return owner
        except UnreadableError as error:
            problem = str(error).rstrip(".")
        newest = [checkpoint.folder for checkpoint in list_complete(run / "checkpoints")[:1]]
        start = f", or start a new run with {shell_word(setting('resume', newest[0]))}" if newest else ""
        raise CheckpointError(f"{problem}: no run writes there. Copy {MARK} from the original folder{start}.")


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
    owner = OwnershipToken.find(root.parent)
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
    if foreign := owner.remove(folder, _WRITTEN, proven=proven):
        aside = free_name(folder.with_name(f"{name}.aside"))
        with suppress(OSError):
            folder.rename(aside)
            unmark(aside)
            files = ", ".join(foreign)
            print_notice(f"{aside} holds the files of {name} that this run did not write; {name} is deleted: {files}.")


def unmark(folder: Path) -> None:
    """Remove the token file from a complete checkpoint: its manifest holds the token."""
    with suppress(OSError):
        (folder / MARK).unlink()
