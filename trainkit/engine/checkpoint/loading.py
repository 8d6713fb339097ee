"""Reading a checkpoint: verified before anything of it is used, then tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.engine.checkpoint.stored import StoredTensors
from trainkit.engine.checkpoint.tensor_file import TensorFile
from trainkit.engine.manifest import Checkpoint, NewerFormatError, damaged, foreign, has_saved, read_manifest, survey
from trainkit.errors import CheckpointError

__all__ = ["Loaded", "load", "newest_valid", "note_foreign"]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The content of a checkpoint; every byte was compared with its SHA-256."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    """By name, on the host, contiguous, read when asked for; a tied name gives the very tensor of its name."""
    aliases: Mapping[str, str]
    """Tied name -> the name it was written under."""
    meta: Mapping[str, Any]
    """What was given to `save`."""


def load(folder: Path) -> Loaded:
    """Verify one checkpoint: every byte of it is read, and its tensors again when they are asked for.

    Nothing is mapped: the folder may be pruned or replaced while its tensors are in use.

    Raises:
        CheckpointError: incomplete, or damaged: names the file.
    """
    checkpoint = read_manifest(folder)
    index = _read_json(checkpoint, "index.json")
    rest = _read_json(checkpoint, "meta.json")
    files = {
        name: TensorFile.verified(folder / name, record)
        for name, record in checkpoint.files.items()
        if name.endswith(".safetensors")
    }
    try:
        aliases: dict[str, str] = dict(index["aliases"])
        tensors = StoredTensors(index["tensors"], aliases, files)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(folder, f"index.json does not fit the tensors ({error})") from None
    meta = {**rest, "position": checkpoint.position, "fingerprint": checkpoint.fingerprint}
    return Loaded(checkpoint=checkpoint, tensors=tensors, aliases=aliases, meta=meta)


def newest_valid(root: Path, report: Callable[[str], None]) -> Loaded | None:
    """Load the newest checkpoint of a run that is whole; damaged ones are named and passed over.

    Args:
        root: a `checkpoints` folder.
        report: is told of each damaged one, and what is used instead.

    Returns:
        None where the run has completed no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged; or one is of a later version of trainkit.
    """
    problems: list[CheckpointError] = []
    for folder, entry in survey(root):
        try:
            if isinstance(entry, CheckpointError):
                raise entry
            loaded = load(folder)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            problems.append(error)
            continue
        for problem in problems:
            report(f"{problem} Using {folder.name} instead.")
        return loaded
    if problems and has_saved(root):
        raise CheckpointError("\n".join(["no checkpoint is whole:", *(f"  {problem}" for problem in problems)]))
    for problem in problems:
        report(f"{problem} This run has saved nothing yet: it is left where it is, and not used.")
    return None


def note_foreign(root: Path, step: int, report: Callable[[str], None]) -> None:
    """Name the complete checkpoints of other runs that are newer than the step at which a run begins.

    Args:
        root: the `checkpoints` folder of the run.
        step: where it begins.
        report: is told of each.
    """
    for entry in foreign(root):
        if entry.step > step:
            report(
                f"{entry.folder} was not written by this run: it is left where it is, and not used. "
                f"To start a run from it: resume={entry.folder}"
            )


def _read_json(checkpoint: Checkpoint, name: str) -> Any:
    try:
        content = (checkpoint.folder / name).read_bytes()
        record = checkpoint.files[name]
    except (OSError, KeyError) as error:
        raise damaged(checkpoint.folder, f"{name} cannot be read ({error})") from None
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(checkpoint.folder, f"{name} is not what was written (SHA-256 differs)")
    return json.loads(content)
