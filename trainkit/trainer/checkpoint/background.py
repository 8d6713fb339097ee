"""Save checkpoints in the background: a step waits for the copy to the host, a thread hashes and writes to the disk.

One process writes a whole checkpoint (`BackgroundSaver`), or each rank writes its shards (`ShardedSaver`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from trainkit.errors import CheckpointError
from trainkit.objectives.base import Collective
from trainkit.storage import bytes_needed
from trainkit.strategies.collectives import all_gather_object
from trainkit.strategies.tensor_shards import ShardedState
from trainkit.trainer.checkpoint.disk_space import refuse_lack_of_room, unwritten
from trainkit.trainer.checkpoint.saving import (
    CheckpointPart,
    SavePolicy,
    begin,
    commit,
    file_key,
    prune,
    save,
    untied,
    write_part,
)
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.cleanup import delete_temporary_folder
from trainkit.trainer.failpoints import hit
from trainkit.trainer.manifest import Checkpoint
from trainkit.trainer.ownership import OwnershipToken


class BackgroundSaver:
    """Saves one checkpoint at a time in a background thread.

    The host copies reuse their buffers, so the second save allocates no memory; they take the memory of one checkpoint.
    A save that begins while the previous one is still being written waits for it. An error of the thread is raised by
    the next call of any method.
    """

    def __init__(
        self,
        root: Path,
        *,
        policy: SavePolicy | None = None,
        background: bool = True,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._root = root
        self._policy = policy or SavePolicy()
        self._background = background
        self._snapshot = snapshot or Snapshot()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[Checkpoint] = []

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
        metric: float | None = None,
    ) -> None:
        """Copy the tensors to the host and write them in the background; arguments as in `checkpoint.save`.

        On return the tensors may change. With `background=False` the checkpoint exists on return.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written.
        """
        self.wait()
        self._policy = replace(self._policy, owner=self._policy.owned(self._root))
        write = functools.partial(save, self._root, step=step, meta=meta, metric=metric, policy=self._policy)
        if not self._background:
            self._finished.append(write(tensors=tensors, aliases=aliases))
            return
        unique, tied = untied(tensors)
        refuse_lack_of_room(self._root, step, bytes_needed(unique.values()))
        write = functools.partial(write, tensors=self._snapshot.take(unique), aliases={**tied, **(aliases or {})})
        # A daemon: a second Ctrl-C ends the process at once, and leaves a temporary folder that never counts as a
        # checkpoint.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory of the copies in the background; the first save then waits only for the copies."""
        if self._background:
            self._snapshot.prepare(untied(tensors)[0])

    def finished(self) -> list[Checkpoint]:
        """Return the checkpoints written since the last call, without waiting.

        Raises:
            CheckpointError: one could not be written.
        """
        if self._thread is not None and self._thread.is_alive():
            return []
        self.wait()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> None:
        """Wait for the save in progress.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_error()

    def close(self) -> list[Checkpoint]:
        """Wait, release the buffers, and return what `finished` would return.

        Raises:
            CheckpointError: the last save could not be written.
        """
        try:
            self.wait()
        finally:
            self._snapshot.release()
        return self.finished()

    def _write(self, write: Callable[[], Checkpoint]) -> None:
        try:
            self._snapshot.wait_copied()
            self._finished.append(write())
        except BaseException as error:  # noqa: BLE001 - carried to the thread that trains
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


_T = TypeVar("_T")
_VISIBLE_TIMEOUT_S: Final = 10.0
"""A network file system may show a new folder late to another host."""


@dataclass(kw_only=True)
class _PendingSave:
    """A save between its copy to the host and its manifest."""

    step: int
    draft: Path
    meta: Mapping[str, Any]
    metric: float | None
    needed: int
    """Bytes that all ranks write."""
    writing: threading.Thread | None = None
    part: CheckpointPart | None = None
    error: BaseException | None = None


class ShardedSaver:
    """Saves one checkpoint at a time, written by all ranks; each rank waits for the copy of its shards to the host.

    All ranks call `save`, `proceed`, `wait` and `close` in the same order; the calls are collective while a save is in
    progress. A checkpoint that one rank cannot write is an error on every rank, and is removed. The ranks communicate
    between steps, never from a thread: collectives of a thread would interleave with those of the training.

    Args:
        root: the `checkpoints` folder, which all ranks see.
        all_ranks: all processes of the run; rank 0 completes the checkpoints.
        policy: what all checkpoints of the run have in common; only rank 0 needs an owner, and confirms.
        background: whether the files are written in the background.
        snapshot: makes the copies; None: a new one.
    """

    def __init__(
        self,
        root: Path,
        all_ranks: Collective,
        *,
        policy: SavePolicy | None = None,
        background: bool = True,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._root, self._all_ranks = root, all_ranks
        self._policy, self._background = policy or SavePolicy(), background
        self._snapshot = snapshot or Snapshot()
        self._pending: _PendingSave | None = None
        self._finished: list[Checkpoint] = []

    def save(self, *, step: int, pieces: ShardedState, meta: Mapping[str, Any], metric: float | None = None) -> None:
        """Copy this rank's shards to the host and write them in the background; collective.

        On return the tensors may change. With `background=False` the checkpoint exists on return.

        Args:
            step: updates completed.
            pieces: the shards that this rank writes; each part of a tensor is written by exactly one rank.
            meta: JSON, that of rank 0 is saved.
            metric: the monitored metric, if known.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written; the same on every rank.
        """
        self.wait()
        needed = self._refuse_lack_of_room(step, pieces)
        found = _PendingSave(step=step, draft=self._begin(step), meta=meta, metric=metric, needed=needed)
        if self._background:
            pieces = self._copied(pieces)
            found.writing = threading.Thread(target=self._write, args=(found, pieces), name="checkpoint", daemon=True)
        self._pending = found
        if found.writing is None:
            self._write(found, pieces)
            self.wait()
        else:
            found.writing.start()

    def prepare(self, pieces: ShardedState) -> None:
        """Allocate the memory of the copies in the background; not collective."""
        if self._background:
            parts = ((name, place, piece) for name, found in pieces.items() for place, piece in enumerate(found))
            self._snapshot.prepare({file_key(name, place): piece.tensor for name, place, piece in parts})

    def proceed(self) -> None:
        """Complete the checkpoint in progress, if all ranks have written their files; collective while there is one.

        Raises:
            CheckpointError: it could not be written; the same on every rank.
        """
        if self._pending is not None:
            writing = self._pending.writing
            own = torch.tensor([int(writing is not None and writing.is_alive())])
            if not any(int(busy) for busy in self._all_ranks.gather(own)):
                self._complete(self._pending)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete; collective while there is one.

        Raises:
            CheckpointError: it could not be written; the same on every rank.
        """
        if self._pending is not None:
            if self._pending.writing is not None:
                self._pending.writing.join()
            self._complete(self._pending)

    def finished(self) -> list[Checkpoint]:
        """Return the checkpoints completed since the last call, on rank 0; without communication."""
        finished, self._finished = self._finished, []
        return finished

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

    @functools.cached_property
    def _owner(self) -> OwnershipToken:
        return self._policy.owned(self._root)

    @property
    def _completes(self) -> bool:
        return self._all_ranks.rank == 0

    @property
    def _who(self) -> str:
        """Prefix of errors that names this rank; empty on rank 0, which writes for all."""
        return "" if self._completes else f"rank {self._all_ranks.rank}: "

    def _refuse_lack_of_room(self, step: int, pieces: ShardedState) -> int:
        """Return the bytes that all ranks together will write, if there is space for them; collective."""
        own = bytes_needed(piece.tensor for parts in pieces.values() for piece in parts)
        needed: int = sum(all_gather_object(own, self._all_ranks))
        asked = needed if self._completes else 0  # all ranks share one file system: rank 0 checks it for all
        self._agreed(lambda: refuse_lack_of_room(self._root, step, asked, largest_file=own, who=self._who))
        return needed

    def _begin(self, step: int) -> Path:
        """Make the folder that all ranks write into, on rank 0; return its path on every rank."""
        draft = self._agreed(lambda: begin(self._root, step, self._owner) if self._completes else None)
        folder = Path(all_gather_object(str(draft), self._all_ranks)[0])
        try:
            self._agreed(lambda: _refuse_unseen(folder, self._all_ranks.rank))
        except CheckpointError:
            if self._completes:
                delete_temporary_folder(folder, self._owner)
            raise
        return folder

    def _copied(self, pieces: ShardedState) -> ShardedState:
        keys = {(name, place): file_key(name, place) for name, parts in pieces.items() for place in range(len(parts))}
        copies = self._snapshot.take({key: pieces[name][place].tensor for (name, place), key in keys.items()})
        return {
            name: [replace(piece, tensor=copies[keys[name, place]]) for place, piece in enumerate(parts)]
            for name, parts in pieces.items()
        }

    def _write(self, found: _PendingSave, pieces: ShardedState) -> None:
        rank = self._all_ranks.rank
        try:
            if rank:  # rank 0 reaches this failpoint when it completes the checkpoint
                hit("save", found.step)
            self._snapshot.wait_copied()
            if any(pieces.values()) or not rank:
                found.part = write_part(found.draft, pieces, rank=rank)
        except OSError as error:
            found.error = unwritten(self._root, found.step, error, needed=found.needed, who=self._who)
        except BaseException as error:  # noqa: BLE001 - sent to all ranks, and raised by each
            found.error = error

    def _complete(self, found: _PendingSave) -> None:
        self._pending = None
        try:
            self._agreed(lambda: _raise(found.error))
            parts = all_gather_object(None if found.part is None else found.part.to_json(), self._all_ranks)
            self._agreed(
                lambda: self._commit(found, [CheckpointPart.from_json(part) for part in parts if part is not None])
            )
        finally:
            if self._completes:
                delete_temporary_folder(found.draft, self._owner)

    def _commit(self, found: _PendingSave, parts: list[CheckpointPart]) -> None:
        if not self._completes:
            return
        try:
            done = commit(
                found.draft,
                step=found.step,
                parts=parts,
                meta=found.meta,
                aliases={},
                metric=found.metric,
                confirm=self._policy.confirm,
            )
        except OSError as error:
            raise unwritten(self._root, found.step, error, needed=found.needed) from error
        self._finished.append(done)
        prune(self._root, self._policy.retention, step=found.step, owner=self._owner)

    def _agreed(self, act: Callable[[], _T]) -> _T:
        """Run a function; if it fails on one rank, it fails on all."""
        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001 - raised again, after the others know
            error = caught
        errors = all_gather_object(None if error is None else str(error), self._all_ranks)
        if error is not None:
            raise error
        if failed := [text for text in errors if text is not None]:
            raise CheckpointError(failed[0])
        return result  # type: ignore[return-value] # nothing was raised


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _refuse_unseen(folder: Path, rank: int) -> None:
    """Raise if this rank does not see the folder that rank 0 has made."""
    deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} does not see {folder}, which rank 0 created: each rank writes its own part of a "
                f"checkpoint there. Put the run folder on a file system that all hosts share."
            )
        time.sleep(0.05)
