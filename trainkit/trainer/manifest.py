"""Define a complete checkpoint: a folder with a manifest that holds the size and SHA-256 of each of its files.

    checkpoints/
      step_00001234/
        rank_00000.safetensors   tensors; one file per writing rank index.json               tensor name -> shape,
        dtype, pieces (file, offset, size, and the key in the file if it differs from the name, because the rank holds
        several pieces); tied names meta.json                state of the trainer: counters, loss scale, ...
        manifest.json written last
      index.json                 {"last": "step_00001234", "best": null}: names, not copies; derived from the manifests

Reading manifests does not import torch: listing runs and the supervisor's progress checks are cheap.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.bounded import Kind, expect_map, expect_maps
from trainkit.errors import AbsentFileError, CheckpointError, UnreadableError
from trainkit.files import read_json, refuse_link, size_of
from trainkit.trainer.ownership import OwnershipToken

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
            found = size_of(folder / name)
        except AbsentFileError:
            raise damaged(folder, f"{name} is absent") from None
        except UnreadableError as error:
            raise damaged(folder, f"{name} cannot be read ({error.reason})") from None
        if found != record.num_bytes:
            raise damaged(folder, f"{name} has {found} bytes instead of {record.num_bytes}")
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
    files = {one: FileRecord(num_bytes=of["bytes"], sha256=of["sha256"]) for one, of in content["files"].items()}
    kept = {key: content.get(key) for key in ("step", "position", "fingerprint", "metric", "owner")}
    return Checkpoint(folder=folder, files=files, **kept)


def _own_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error of a checkpoint whose content has changed since it was written."""
    return CheckpointError(f"checkpoint {folder} is damaged: {what}.")


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
    owner = OwnershipToken.found(root.parent)
    try:
        _refuse_unreadable(root)
        folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)] if root.exists() else []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {root} cannot be read: {error.strerror or error}.") from None
    found: list[tuple[Path, Checkpoint | CheckpointError]] = []
    for folder in sorted(folders, key=step_of, reverse=True):
        entry: Checkpoint | CheckpointError
        try:
            entry = manifest_below(root, folder.name)
        except CheckpointError as error:
            entry = error
        if (isinstance(entry, Checkpoint) and owner is not None and entry.owner != owner.token) is foreign:
            found.append((folder, entry))
    return found


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
