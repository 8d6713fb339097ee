"""Write checkpoints: a step waits for the copy to the host, a thread hashes and writes to the disk.

Each rank fills its file in a temporary folder, every file is flushed, rank 0 writes the manifest last, and renames the
folder: at any moment, and after any crash, a reader sees either a complete checkpoint or none.

    saver = Saver(root, retention=Retention(keep_last=2, keep_best=1, mode="max"))
    saver.save(step=100, pieces=pieces, meta=meta, metric=0.97)     # waits only for the copy to the host
    saver.close()                                                   # waits for the disk
    loaded = newest_valid(root, report=print)                       # reports a damaged one, uses the previous one
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from trainkit.errors import CheckpointError, StorageError
from trainkit.files import bytes_needed, lacking, open_regular, reason_and_room, remedy_of, sync_folder
from trainkit.objectives.base import Collective
from trainkit.strategies.collectives import LocalCollective, all_gather_object
from trainkit.strategies.tensor_shards import ShardedState, coverage_error
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.checkpoint.tensors import NAMES, refuse_unwritable, write_bytes, write_tensors
from trainkit.trainer.failpoints import hit
from trainkit.trainer.manifest import (
    MANIFEST,
    Checkpoint,
    FileRecord,
    Retention,
    delete_temporary_folder,
    folder_name,
    list_complete,
    make_room,
    manifest_bytes,
    new_temporary_folder,
    owner_of,
    unmark,
)
from trainkit.trainer.ownership import OwnershipToken, uncontested

_T = TypeVar("_T")
_VISIBLE_TIMEOUT_S: Final = 10.0
"""A network file system may show a new folder late to another host."""


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is being written, until its folder is renamed."""

    folder: Path
    """The temporary folder."""
    step: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    metric: float | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name of a tied tensor -> the name that is written."""
    needed: int = 0
    """Bytes that all ranks write."""
    thread: threading.Thread | None = None
    part: dict[str, Any] | None = None
    """The file of this rank, as `write_part` returns it."""
    error: BaseException | None = None


class Saver:
    """Saves one checkpoint at a time, written by one process or by all ranks, each its shards.

    The host copies reuse their buffers, so the second save allocates no memory; they take the memory of one checkpoint.
    A save that begins while the previous one is still being written waits for it.

    All ranks call `save`, `finished`, `wait` and `close` in the same order; the calls are collective while a save is in
    progress. A checkpoint that one rank cannot write is an error on every rank, raised by the next call, and is
    removed. Ranks communicate between steps, never from a thread: collectives of a thread would interleave with those
    of the training. So the thread of a single process completes a checkpoint, and several ranks complete it in a call.

    Args:
        root: the `checkpoints` folder, which all ranks see; created if absent.
        ranks: the ranks that write; rank 0 completes the checkpoints. None: this process alone.
        retention: the checkpoints to keep; None: all.
        confirm: called on rank 0 before a checkpoint is renamed; raises if another group owns the folder now.
        owner: the run; None: the owner of the folder of checkpoints. Only rank 0 needs it.
        background: whether the files are written in the background.
        snapshot: makes the copies; None: a new one.
    """

    def __init__(
        self,
        root: Path,
        ranks: Collective | None = None,
        *,
        retention: Retention | None = None,
        confirm: Callable[[], None] = uncontested,
        owner: OwnershipToken | None = None,
        background: bool = True,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._root, self._ranks, self._background = root, ranks or LocalCollective(), background
        self._retention, self._confirm, self._owner = retention or Retention(), confirm, owner or owner_of(root)
        self._snapshot = snapshot or Snapshot()
        self._is_alone, self._is_first = self._ranks.num_ranks == 1, self._ranks.rank == 0
        self._who = "" if self._is_first else f"rank {self._ranks.rank}: "
        self._pending: Draft | None = None
        self._finished: list[Checkpoint] = []

    def save(self, *, step: int, pieces: ShardedState, meta: Mapping[str, Any], metric: float | None = None) -> None:
        """Copy this rank's tensors to the host and write them in the background; collective.

        On return the tensors may change. With `background=False` the checkpoint exists on return.

        Args:
            step: updates completed.
            pieces: the shards that this rank writes by `param/NAME`, `buffer/NAME` and `optimizer/SLOT/NAME`, on any
                device, in any layout; each part of a tensor is written by exactly one rank.
            meta: JSON, that of rank 0 is saved; its keys `position` and `fingerprint` go into the manifest. `load`
                returns all of it.
            metric: the monitored metric, if known.

        Raises:
            StorageError: this checkpoint, or the one before it, could not be written, for example because the disk is
                full; its files are removed.
            CheckpointError: a tensor cannot be saved, or another rank failed.
        """
        self.wait()
        pieces, aliases = self._untied(pieces)
        rank_bytes = bytes_needed(piece.tensor for parts in pieces.values() for piece in parts)
        needed = sum(all_gather_object(rank_bytes, self._ranks))

        def refuse_lack_of_room() -> None:
            """All ranks share one file system: rank 0 checks it for all."""
            required = needed if self._is_first else 0
            with _explained(self._root, step, needed=required, who=self._who):
                if (code := lacking(self._root, required, rank_bytes)) is not None:
                    raise OSError(code, os.strerror(code))

        self._agreed(refuse_lack_of_room)
        if self._background:
            copies = self._snapshot.take(_by_key(pieces))
            pieces = {
                name: [replace(piece, tensor=copies[file_key(name, index)]) for index, piece in enumerate(parts)]
                for name, parts in pieces.items()
            }
        folder = self._begin(step)
        draft = Draft(folder=folder, step=step, meta=meta, metric=metric, aliases=aliases, needed=needed)
        self._pending = draft
        if not self._background:
            self._write(draft, pieces)
            return self.wait()
        # A daemon: a second Ctrl-C ends the process at once, and leaves a temporary folder that never counts as a
        # checkpoint.
        draft.thread = threading.Thread(target=self._write, args=(draft, pieces), name="checkpoint", daemon=True)
        return draft.thread.start()

    def prepare(self, pieces: ShardedState) -> None:
        """Allocate the memory of the copies in the background, so that the first save waits only for the copies; not
        collective.
        """
        if self._background:
            self._snapshot.prepare(_by_key(self._untied(pieces)[0]))

    def finished(self) -> list[Checkpoint]:
        """Return the checkpoints completed since the last call, on rank 0, without waiting for a disk; collective while
        a save is in progress.

        Raises:
            CheckpointError: one could not be written; the same on every rank.
        """
        if (draft := self._pending) is not None:
            busy = torch.tensor([int(draft.thread is not None and draft.thread.is_alive())])
            if not any(int(flag) for flag in self._ranks.gather(busy)):
                self._complete(draft)
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete; collective while there is one.

        Raises:
            CheckpointError: it could not be written; the same on every rank.
        """
        if (draft := self._pending) is not None:
            if draft.thread is not None:
                draft.thread.join()
            self._complete(draft)

    def close(self) -> list[Checkpoint]:
        """Wait, release the buffers, and return what `finished` would return; collective while a save is in progress.

        Raises:
            CheckpointError: the last save could not be written; the same on every rank.
        """
        try:
            self.wait()
        finally:
            self._snapshot.release()
        return self.finished()

    def _untied(self, pieces: ShardedState) -> tuple[ShardedState, dict[str, str]]:
        """Separate the tensors that share memory, if this process writes all of them; shards are never tied."""
        if not self._is_alone:
            return pieces, {}
        unique, tied = untied({name: parts[0].tensor for name, parts in pieces.items()})
        return {name: pieces[name] for name in unique}, tied

    def _begin(self, step: int) -> Path:
        """Make the folder that all ranks write into, on rank 0; return its path on every rank."""
        path = self._agreed(lambda: str(begin(self._root, step, self._owner)) if self._is_first else "")
        folder = Path(all_gather_object(path, self._ranks)[0])

        def refuse_unseen() -> None:
            deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
            while not folder.is_dir():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank {self._ranks.rank} does not see {folder}, which rank 0 created: each rank writes its "
                        f"own part of a checkpoint there. Put the run folder on a file system that all hosts share."
                    )
                time.sleep(0.05)

        try:
            self._agreed(refuse_unseen)
        except CheckpointError:
            self._discard(folder)
            raise
        return folder

    def _discard(self, folder: Path) -> None:
        if self._is_first:
            delete_temporary_folder(folder, self._owner)

    def _write(self, draft: Draft, pieces: ShardedState) -> None:
        """Write this rank's file; a single process also completes the checkpoint."""
        rank = self._ranks.rank
        try:
            self._snapshot.wait_copied()
            with _explained(self._root, draft.step, needed=draft.needed, who=self._who):
                if rank:  # rank 0 reaches this failpoint when it completes the checkpoint
                    hit("save", draft.step)
                if any(pieces.values()) or not rank:
                    draft.part = write_part(draft.folder, pieces, rank=rank)
            if self._is_alone:
                self._commit(draft, [draft.part])
        except BaseException as error:  # noqa: BLE001 - carried to the thread that trains, and to all ranks
            draft.error = error
            if self._is_alone:
                self._discard(draft.folder)

    def _complete(self, draft: Draft) -> None:
        self._pending = None

        def raise_error() -> None:
            if draft.error is not None:
                raise draft.error

        try:
            self._agreed(raise_error)
            if not self._is_alone:
                parts = all_gather_object(draft.part, self._ranks)
                self._agreed(lambda: self._commit(draft, parts))
        finally:
            self._discard(draft.folder)

    def _commit(self, draft: Draft, parts: Sequence[dict[str, Any] | None]) -> None:
        if self._is_first:
            with _explained(self._root, draft.step, needed=draft.needed):
                done = commit(draft, [part for part in parts if part is not None], self._owner, self._confirm)
            self._finished.append(done)
            self._retention.apply(self._root, step=draft.step, owner=self._owner)

    def _agreed(self, act: Callable[[], _T]) -> _T:
        """Run a function; if it fails on one rank, it fails on all."""
        if self._is_alone:
            return act()
        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001 - raised again, after the others know
            error = caught
        errors = all_gather_object(None if error is None else str(error), self._ranks)
        if error is not None:
            raise error
        if failed := [text for text in errors if text is not None]:
            raise CheckpointError(failed[0])
        return result  # type: ignore[return-value] # nothing was raised


def file_key(name: str, index: int) -> str:
    """Return the key of a tensor's piece in the file of a rank with several pieces: no module name contains `#`.

    Example:
        >>> file_key("param/w", 0), file_key("param/w", 1)
        ('param/w', 'param/w#1')
    """
    return name if index == 0 else f"{name}#{index}"


def _by_key(pieces: ShardedState) -> dict[str, Tensor]:
    return {file_key(name, index): piece.tensor for name, parts in pieces.items() for index, piece in enumerate(parts)}


@contextmanager
def _explained(root: Path, step: int, *, needed: int | None = None, who: str = "") -> Iterator[None]:
    """Raise errors of the system in this block as that of a checkpoint that could not be written.

    Args:
        root: the `checkpoints` folder.
        step: the step of the checkpoint.
        needed: bytes of the checkpoint, if known.
        who: the rank whose part it was, if several write.
    """
    try:
        yield
    except OSError as error:
        try:
            complete = list_complete(root)
        except OSError:
            complete = []
        last = f"The last complete one is {complete[0].folder}" if complete else "There is no earlier one"
        why = reason_and_room(root, error, needed=needed)
        raise StorageError(
            f"the checkpoint of step {step} could not be written below {root}: {who}{why}. {last}. {remedy_of(error)}"
        ) from error


def begin(root: Path, step: int, owner: OwnershipToken) -> Path:
    """Create the temporary folder of a checkpoint, and delete the temporary folders of killed attempts of this run.

    Raises:
        StorageError: it cannot be created; a removed run folder is not created again.
    """
    with _explained(root, step):
        return new_temporary_folder(root, step, owner)


def write_part(draft: Path, pieces: ShardedState, *, rank: int = 0) -> dict[str, Any]:
    """Write the shards of one rank into a draft, and return what `commit` needs to know of its file, as JSON.

    Raises:
        CheckpointError: a tensor cannot be saved.
        OSError: the file could not be written.
    """
    for name, parts in pieces.items():
        for piece in parts:
            refuse_unwritable(name, piece.tensor)
    file = f"rank_{rank:05d}.safetensors"
    record = write_tensors(draft / file, _by_key(pieces))
    written = [
        (
            {"name": name, "dtype": NAMES[piece.tensor.dtype], "shape": [*piece.shape]},
            {"file": file, **({"key": file_key(name, index)} if index else {}), "offset": [*piece.offset]},
            [*piece.tensor.shape],
        )
        for name, parts in pieces.items()
        for index, piece in enumerate(parts)
    ]
    return {"file": file, "num_bytes": record.num_bytes, "sha256": record.sha256, "tensors": written}


def commit(
    draft: Draft,
    parts: Sequence[Mapping[str, Any]],
    owner: OwnershipToken,
    confirm: Callable[[], None] = uncontested,
) -> Checkpoint:
    """Write index, meta and manifest, and rename the folder: afterwards the checkpoint exists.

    Raises:
        CheckpointError: the parts do not make up the tensors.
        OSError: a file could not be written.
    """
    rest = {key: value for key, value in draft.meta.items() if key not in ("position", "fingerprint")}
    index = {"tensors": _index(parts), "aliases": dict(draft.aliases)}
    files = {part["file"]: FileRecord(num_bytes=part["num_bytes"], sha256=part["sha256"]) for part in parts}
    for name, content in (("index.json", index), ("meta.json", rest)):
        files[name] = write_bytes(draft.folder / name, json.dumps(content, indent=1).encode())
    checkpoint = Checkpoint(
        folder=draft.folder.parent / folder_name(draft.step),
        step=draft.step,
        position=draft.meta.get("position"),
        fingerprint=draft.meta.get("fingerprint"),
        metric=draft.metric,
        owner=owner.token,
        files=files,
    )
    hit("save", draft.step)
    return _renamed(draft.folder, checkpoint, owner, confirm)


def adopt_checkpoint(checkpoint: Checkpoint, root: Path, owner: OwnershipToken) -> Checkpoint:
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
    needed = sum(record.num_bytes for record in checkpoint.files.values())
    try:
        with _explained(root, checkpoint.step, needed=needed):
            for name in checkpoint.files:
                with open_regular(checkpoint.folder / name) as file:  # refuses everything but a regular file
                    try:
                        os.link(checkpoint.folder / name, draft / name, follow_symlinks=False)
                    except OSError:
                        with (draft / name).open("xb") as copy:
                            shutil.copyfileobj(file, copy)
                            copy.flush()
                            os.fsync(copy.fileno())
            return _renamed(draft, received, owner)
    finally:
        delete_temporary_folder(draft, owner)


def _renamed(
    draft: Path, checkpoint: Checkpoint, owner: OwnershipToken, confirm: Callable[[], None] = uncontested
) -> Checkpoint:
    """Write the manifest into a draft, and rename the draft: afterwards the checkpoint exists."""
    write_bytes(draft / MANIFEST, manifest_bytes(checkpoint))
    sync_folder(draft)
    confirm()
    replaced = make_room(checkpoint.folder, owner)
    draft.rename(checkpoint.folder)
    unmark(checkpoint.folder)
    sync_folder(checkpoint.folder.parent)
    if replaced is not None:
        delete_temporary_folder(replaced, owner)
    return checkpoint


def _index(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for part in parts:
        for kind, piece, size in part["tensors"]:
            tensor = index.setdefault(kind["name"], {"dtype": kind["dtype"], "shape": kind["shape"], "pieces": []})
            if (tensor["dtype"], tensor["shape"]) != (kind["dtype"], kind["shape"]):
                raise CheckpointError(f"{kind['name']} cannot be saved: its pieces are of several shapes or dtypes.")
            tensor["pieces"].append({**piece, "size": size})
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
    name_of: dict[tuple[Any, ...], str] = {}
    unique, tied = {}, {}
    for name, tensor in tensors.items():
        refuse_unwritable(name, tensor)
        # an XLA tensor has no address: it is never tied
        same = (tensor.data_ptr() or id(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        first = name_of.setdefault(same, name) if tensor.numel() else name
        if first == name:
            unique[name] = tensor
        else:
            tied[name] = first
    return unique, tied
