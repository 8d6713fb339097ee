"""Write a checkpoint: fill a temporary folder, flush every file, write the manifest last, and rename the folder.

At any moment, and after any crash, a reader sees either a complete checkpoint or none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from trainkit.errors import CheckpointError
from trainkit.files import open_regular, size_of
from trainkit.storage import bytes_needed, naming, sync_folder
from trainkit.strategies.tensor_shards import ShardedState, TensorShard, coverage_error
from trainkit.trainer.checkpoint.disk_space import refuse_lack_of_room, unwritten
from trainkit.trainer.checkpoint.retention import Retention
from trainkit.trainer.checkpoint.tensor_file import NAMES, refuse_unwritable, write_bytes, write_tensors
from trainkit.trainer.cleanup import (
    delete_temporary_folder,
    delete_temporary_folders,
    make_room,
    owner_of,
    temporary_folder_of,
    unmark,
)
from trainkit.trainer.failpoints import hit
from trainkit.trainer.manifest import MANIFEST, Checkpoint, FileRecord, folder_name, manifest_bytes
from trainkit.trainer.ownership import OwnershipToken, uncontested


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """The part of a checkpoint that one rank wrote."""

    file: str
    record: FileRecord
    tensors: Mapping[str, Mapping[str, Any]]
    """Key in this file -> {"name" of the tensor, "dtype", "shape" of the whole, "offset" and "size" of the piece}."""

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON for another rank."""
        record = {"num_bytes": self.record.num_bytes, "sha256": self.record.sha256}
        return {"file": self.file, "record": record, "tensors": dict(self.tensors)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Restore a part from `to_json`."""
        return cls(file=content["file"], record=FileRecord(**content["record"]), tensors=content["tensors"])


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """The settings that all checkpoints of a run share."""

    retention: Retention = field(default_factory=Retention)
    """The checkpoints to keep; by default all."""
    confirm: Callable[[], None] = uncontested
    """Function called before a checkpoint is renamed; raises if another group owns the folder now."""
    owner: OwnershipToken | None = None
    """The run; None: the owner of the folder of checkpoints."""

    def owned(self, root: Path) -> OwnershipToken:
        """Return the owner of new files in a folder of checkpoints."""
        return self.owner or owner_of(root)


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
    metric: float | None = None,
    policy: SavePolicy | None = None,
) -> Checkpoint:
    """Write a checkpoint from one process, then prune the older ones.

    Args:
        root: the `checkpoints` folder of the run; created if absent.
        step: updates completed.
        tensors: by `param/NAME`, `buffer/NAME` and `optimizer/SLOT/NAME`; on any device, in any layout.
        meta: JSON; its keys `position` and `fingerprint` go into the manifest. `load` returns all of it.
        aliases: other name -> name in `tensors`, for tied parameters; tensors that share memory are detected anyway.
        metric: the monitored metric, if known.
        policy: what all checkpoints of the run have in common; None: every checkpoint is kept, and nothing is checked.

    Raises:
        StorageError: it could not be written, for example because the disk is full; its files are removed.
        CheckpointError: a tensor cannot be saved.
    """
    policy = policy or SavePolicy()
    owner = policy.owned(root)
    unique, tied = untied(tensors)
    needed = bytes_needed(unique.values())
    refuse_lack_of_room(root, step, needed)
    draft = begin(root, step, owner)
    try:
        part = write_part(draft, {name: (TensorShard.whole(tensor),) for name, tensor in unique.items()})
        tied |= {name: tied.get(target, target) for name, target in (aliases or {}).items()}
        checkpoint = commit(
            draft, step=step, parts=[part], meta=meta, aliases=tied, metric=metric, confirm=policy.confirm
        )
    except OSError as error:
        raise unwritten(root, step, error, needed=needed) from error
    finally:
        delete_temporary_folder(draft, owner)
    prune(root, policy.retention, step=step, owner=owner)
    return checkpoint


def begin(root: Path, step: int, owner: OwnershipToken | None = None) -> Path:
    """Create the temporary folder of a checkpoint, and delete the temporary folders of killed attempts of this run.

    Raises:
        StorageError: it cannot be created; a removed run folder is not created again.
    """
    owner = owner or owner_of(root)
    try:
        root.mkdir(exist_ok=True)
        delete_temporary_folders(root, owner)
        draft = temporary_folder_of(root, step)
        owner.make(draft)
    except OSError as error:
        raise unwritten(root, step, error) from error
    return draft


def write_part(draft: Path, pieces: ShardedState, *, rank: int = 0) -> CheckpointPart:
    """Write the shards of one rank into a draft; every rank of a sharded model writes its own file.

    Raises:
        CheckpointError: a tensor cannot be saved.
        OSError: the file could not be written.
    """
    held = {file_key(name, place): (name, piece) for name, parts in pieces.items() for place, piece in enumerate(parts)}
    for name, piece in held.values():
        refuse_unwritable(name, piece.tensor)
    file = f"rank_{rank:05d}.safetensors"
    record = write_tensors(draft / file, {key: piece.tensor for key, (_, piece) in held.items()})
    entries = {
        key: {
            "name": name,
            "dtype": NAMES[piece.tensor.dtype],
            "shape": list(piece.shape),
            "offset": list(piece.offset),
            "size": list(piece.tensor.shape),
        }
        for key, (name, piece) in held.items()
    }
    return CheckpointPart(file=file, record=record, tensors=entries)


def file_key(name: str, place: int) -> str:
    """Return the key of a tensor's piece in the file of a rank with several pieces: no module name contains `#`.

    Example:
        >>> file_key("param/w", 0), file_key("param/w", 1)
        ('param/w', 'param/w#1')
    """
    return name if place == 0 else f"{name}#{place}"


def commit(
    draft: Path,
    *,
    step: int,
    parts: Iterable[CheckpointPart],
    meta: Mapping[str, Any],
    aliases: Mapping[str, str],
    metric: float | None = None,
    confirm: Callable[[], None] = uncontested,
) -> Checkpoint:
    """Write index, meta and manifest, and rename the folder: afterwards the checkpoint exists.

    The token of the draft goes into the manifest.
    """
    owner = OwnershipToken.found(draft)
    final = draft.parent / folder_name(step)
    parts = list(parts)
    rest = {key: value for key, value in meta.items() if key not in ("position", "fingerprint")}
    files = {part.file: part.record for part in parts}
    index = {"tensors": _index(parts), "aliases": dict(aliases)}
    if not set(aliases.values()) <= index["tensors"].keys():
        raise ValueError(f"aliases name tensors that are not in the checkpoint: {aliases}")
    files["index.json"] = write_bytes(draft / "index.json", _json(index))
    files["meta.json"] = write_bytes(draft / "meta.json", _json(rest))
    checkpoint = Checkpoint(
        folder=final,
        step=step,
        position=meta.get("position"),
        fingerprint=meta.get("fingerprint"),
        metric=metric,
        owner=None if owner is None else owner.token,
        files=files,
    )
    hit("save", step)
    return _complete(draft, checkpoint, owner, confirm)


def bring(checkpoint: Checkpoint, root: Path, owner: OwnershipToken) -> Checkpoint:
    """Give a run a complete checkpoint of another run, under the token of the run that receives it.

    Its files are linked, which takes no room: the files of a checkpoint never change, and each run deletes only its own
    names of them. They are copied where the file system does not link.

    Args:
        checkpoint: the checkpoint of the other run.
        root: the `checkpoints` folder of the run that receives it; created if absent.
        owner: the run that receives it.

    Raises:
        StorageError: it could not be written; its files are removed.
        UnreadableError: a file is not a regular file.
    """
    draft = begin(root, checkpoint.step, owner)
    received = replace(checkpoint, folder=root / folder_name(checkpoint.step), owner=owner.token)
    try:
        for name in checkpoint.files:
            size_of(checkpoint.folder / name)  # refuses everything but a regular file
            try:
                os.link(checkpoint.folder / name, draft / name, follow_symlinks=False)
            except OSError:
                with open_regular(checkpoint.folder / name) as file, (draft / name).open("xb") as copy:
                    shutil.copyfileobj(file, copy)
                    copy.flush()
                    os.fsync(copy.fileno())
        return _complete(draft, received, owner)
    except OSError as error:
        needed = sum(record.num_bytes for record in checkpoint.files.values())
        raise unwritten(root, checkpoint.step, error, needed=needed) from error
    finally:
        delete_temporary_folder(draft, owner)


def _complete(
    draft: Path, checkpoint: Checkpoint, owner: OwnershipToken | None, confirm: Callable[[], None] = uncontested
) -> Checkpoint:
    """Write the manifest into a draft, and rename the draft: afterwards the checkpoint exists."""
    write_bytes(draft / MANIFEST, manifest_bytes(checkpoint))
    sync_folder(draft)
    confirm()
    replaced = make_room(checkpoint.folder, owner)
    draft.rename(checkpoint.folder)
    unmark(checkpoint.folder)
    sync_folder(checkpoint.folder.parent)
    if replaced is not None and owner is not None:
        delete_temporary_folder(replaced, owner)
    return checkpoint


def prune(root: Path, retention: Retention, *, step: int, owner: OwnershipToken) -> None:
    """Delete the checkpoints of this run that are not kept, after a new one is complete.

    Raises:
        StorageError: the file system refuses; no checkpoint is lost.
    """
    with naming(root):
        retention.apply(root, step=step, owner=owner)


def _index(parts: Iterable[CheckpointPart]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for part in parts:
        for key, entry in part.tensors.items():
            name, kind = entry["name"], {"dtype": entry["dtype"], "shape": entry["shape"]}
            tensor = index.setdefault(name, {**kind, "pieces": []})
            if not kind.items() <= tensor.items():
                raise CheckpointError(f"{name} cannot be saved: its pieces are of several shapes or dtypes.")
            called = {} if key == name else {"key": key}
            tensor["pieces"].append({"file": part.file, **called, "offset": entry["offset"], "size": entry["size"]})
    for name, tensor in index.items():
        if wrong := coverage_error(tensor["shape"], [(piece["offset"], piece["size"]) for piece in tensor["pieces"]]):
            raise CheckpointError(f"{name} cannot be saved: {wrong}.")
    return index


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the names that share memory, dtype and layout with an earlier one.

    Returns:
        The tensors to write, and other name -> written name.

    Raises:
        CheckpointError: a tensor cannot be saved.
    """
    seen: dict[tuple[Any, ...], str] = {}
    unique, tied = {}, {}
    for name, tensor in tensors.items():
        refuse_unwritable(name, tensor)
        # an XLA tensor has no address: it is never tied
        same = (tensor.data_ptr() or id(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(same, name) if tensor.numel() else name
        if first == name:
            unique[name] = tensor
        else:
            tied[name] = first
    return unique, tied


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode()
