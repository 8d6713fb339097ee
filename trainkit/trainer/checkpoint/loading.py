"""Load a checkpoint: it is verified before anything of it is used, then read tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from trainkit.bounded_json import expect_map, parse_json
from trainkit.errors import CheckpointError, UnreadableError
from trainkit.reading import read_bytes, refuse_link
from trainkit.trainer.checkpoint.lazy_tensors import StoredTensors
from trainkit.trainer.checkpoint.tensor_file import TensorFile
from trainkit.trainer.manifest import (
    MANIFEST,
    Checkpoint,
    NewerFormatError,
    damaged,
    foreign,
    has_saved,
    list_all,
    read_manifest,
)

_MAX_BYTES: Final = 1 << 30
"""Size limit of an index, which has about a hundred bytes for each piece of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The content of a checkpoint; every byte was compared with its SHA-256."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    """Tensors by name, on the host, contiguous, read on access; a tied name returns the same tensor object."""
    aliases: Mapping[str, str]
    """Tied name -> the name it was written under."""
    meta: Mapping[str, Any]
    """The `meta` that was given to `save`."""


def load(folder: Path) -> Loaded:
    """Verify one checkpoint: all its bytes are read, and its tensors are read again on access.

    Nothing is mapped: the folder may be pruned or replaced while its tensors are in use.

    Raises:
        CheckpointError: it is incomplete or damaged; the error names the file.
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
        expect_map(index, {"tensors": dict, "aliases": dict})
        aliases: dict[str, str] = index["aliases"]
        tensors = StoredTensors(index["tensors"], aliases, files)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise damaged(folder, f"index.json does not fit the tensors ({_one_line(error)})") from None
    meta = {**rest, "position": checkpoint.position, "fingerprint": checkpoint.fingerprint}
    return Loaded(checkpoint=checkpoint, tensors=tensors, aliases=aliases, meta=meta)


def load_below(root: Path, name: str) -> Loaded:
    """Verify the checkpoint of a name in a `checkpoints` folder; otherwise like `load`.

    Raises:
        CheckpointError: it is incomplete, damaged, or a symbolic link.
    """
    for folder in (root, root / name):
        try:
            refuse_link(folder)
        except UnreadableError as error:
            raise damaged(root / name, f"{folder.name}: {error.reason}") from None
    return load(root / name)


def newest_valid(
    root: Path, report: Callable[[str], None], *, check: Callable[[Loaded], None] = lambda _: None
) -> Loaded | None:
    """Load the newest valid checkpoint of a run; damaged ones are reported and skipped.

    Args:
        root: a `checkpoints` folder.
        report: receives a line about each damaged one, and what is used instead.
        check: raises CheckpointError for a valid one that cannot be used; it is skipped as well.

    Returns:
        None if the run has completed no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged; or one is of a later version of trainkit.
    """
    problems: list[CheckpointError] = []
    for folder, entry in list_all(root):
        try:
            if isinstance(entry, CheckpointError):
                raise entry
            loaded = load(folder)
            check(loaded)
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
    """Report the complete checkpoints of other runs that are newer than the step at which a run begins."""
    for entry in foreign(root):
        if entry.step > step:
            report(
                f"{entry.folder} was not written by this run: it is left where it is, and not used. "
                f"To start a run from it: resume={entry.folder}"
            )


def _read_json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    folder = checkpoint.folder
    record = checkpoint.files.get(name)
    if record is None:
        raise damaged(folder, f"{name} is not listed in {MANIFEST}")
    try:
        content = read_bytes(folder / name, limit=min(record.num_bytes, _MAX_BYTES))
    except UnreadableError as error:
        raise damaged(folder, f"{name} cannot be read ({error.reason})") from None
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(folder, f"{name} is not what was written (SHA-256 differs)")
    try:
        return expect_map(parse_json(content), {})
    except ValueError as error:
        raise damaged(folder, f"{name} is not what was written ({error})") from None


def _one_line(error: Exception, most: int = 200) -> str:
    """Return the first line of an error: torch's errors about crafted numbers may have many."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most]
