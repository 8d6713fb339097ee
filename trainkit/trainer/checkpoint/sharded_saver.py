"""Saving what lies in pieces on several ranks: every rank writes its own file, and one completes the checkpoint.

What the ranks agree on, they exchange between steps, never from a thread: an exchange beside the training's own would
meet those in another order on every rank.
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

from trainkit.errors import CheckpointError
from trainkit.objectives.base import Collective
from trainkit.strategies.groups.gather_objects import all_gather_object
from trainkit.strategies.tensors.sharded import ShardedState
from trainkit.trainer.checkpoint.disk_space import bytes_needed, refuse_lack_of_room, unwritten
from trainkit.trainer.checkpoint.retention import Retention
from trainkit.trainer.checkpoint.saving import CheckpointPart, begin, commit, file_key, prune, write_part
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.cleanup import delete_temporary_folder, owner_of
from trainkit.trainer.failpoints import hit
from trainkit.trainer.manifest import Checkpoint
from trainkit.trainer.ownership import OwnershipToken

__all__ = ["ShardedSaver"]

_T = TypeVar("_T")
_PATIENCE_S: Final = 10.0
"""A network file system may show a new folder late to another host."""


@dataclass(kw_only=True)
class _UnderWay:
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
    """Saves one checkpoint at a time, written by all ranks; a rank pays for the copy of its pieces to the host.

    `save`, `proceed`, `wait` and `close` are called by all ranks alike, and are exchanges while a save is under way.
    A checkpoint that one rank cannot write is an error on every rank, and nothing is left of it.

    Args:
        root: the `checkpoints` folder, which all ranks see.
        everyone: all processes of the run; rank 0 completes the checkpoints.
        retention: what to keep; None keeps everything.
        background: whether the files are written beside the training.
        confirm: asked by rank 0 before a checkpoint gets its name; raises where the folder is another's by now.
        owner: the run; None: whose `root` is. Rank 0 alone needs it.
    """

    def __init__(
        self,
        root: Path,
        everyone: Collective,
        *,
        retention: Retention | None = None,
        background: bool = True,
        confirm: Callable[[], None] | None = None,
        owner: OwnershipToken | None = None,
    ) -> None:
        self._root, self._everyone = root, everyone
        self._given = owner
        self._retention, self._background, self._confirm = retention or Retention(), background, confirm
        self._snapshot = Snapshot()
        self._under_way: _UnderWay | None = None
        self._finished: list[Checkpoint] = []

    def save(self, *, step: int, pieces: ShardedState, meta: Mapping[str, Any], metric: float | None = None) -> None:
        """Copy this rank's pieces to the host and write them beside the training; collective.

        On return the tensors may change. With `background=False` the checkpoint exists on return.

        Args:
            step: updates completed.
            pieces: what this rank writes; each part of a tensor is with one rank alone.
            meta: JSON, that of rank 0 is kept.
            metric: what best is judged by, where known.

        Raises:
            CheckpointError: this one, or the one before it, could not be written; the same on every rank.
        """
        self.wait()
        needed = self._refuse_lack_of_room(step, pieces)
        found = _UnderWay(step=step, draft=self._begin(step), meta=meta, metric=metric, needed=needed)
        if self._background:
            pieces = self._copied(pieces)
            found.writing = threading.Thread(target=self._write, args=(found, pieces), name="checkpoint", daemon=True)
        self._under_way = found
        if found.writing is None:
            self._write(found, pieces)
            self.wait()
        else:
            found.writing.start()

    def proceed(self) -> None:
        """Complete the checkpoint under way, if all ranks have written their files; collective while there is one.

        Raises:
            CheckpointError: it could not be written; the same on every rank.
        """
        if self._under_way is not None:
            writing = self._under_way.writing
            mine = torch.tensor([int(writing is not None and writing.is_alive())])
            if not any(int(busy) for busy in self._everyone.gather(mine)):
                self._complete(self._under_way)

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete; collective while there is one.

        Raises:
            CheckpointError: it could not be written; the same on every rank.
        """
        if self._under_way is not None:
            if self._under_way.writing is not None:
                self._under_way.writing.join()
            self._complete(self._under_way)

    def finished(self) -> list[Checkpoint]:
        """The checkpoints completed since the last call, on rank 0; no exchange."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> list[Checkpoint]:
        """Wait, give the buffers back, and return what `finished` would; collective while a save is under way.

        Raises:
            CheckpointError: the last save could not be written; the same on every rank.
        """
        try:
            self.wait()
        finally:
            self._snapshot.buffers.clear()
        return self.finished()

    @functools.cached_property
    def _owner(self) -> OwnershipToken:
        return self._given or owner_of(self._root)

    @property
    def _completes(self) -> bool:
        return self._everyone.rank == 0

    @property
    def _who(self) -> str:
        """How an error names this rank; rank 0 writes for all."""
        return "" if self._completes else f"rank {self._everyone.rank}: "

    def _refuse_lack_of_room(self, step: int, pieces: ShardedState) -> int:
        """Return the bytes that all ranks together will write, where there is room for them; collective."""
        mine = bytes_needed(piece.tensor for parts in pieces.values() for piece in parts)
        needed: int = sum(all_gather_object(mine, self._everyone))
        asked = needed if self._completes else 0  # the file system is one: rank 0 asks it for all
        self._agreed(lambda: refuse_lack_of_room(self._root, step, asked, largest_file=mine, who=self._who))
        return needed

    def _begin(self, step: int) -> Path:
        """The folder that all ranks write into; rank 0 makes it."""
        draft = self._agreed(lambda: begin(self._root, step, self._owner) if self._completes else None)
        folder = Path(all_gather_object(str(draft), self._everyone)[0])
        try:
            self._agreed(lambda: _refuse_unseen(folder, self._everyone.rank))
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

    def _write(self, found: _UnderWay, pieces: ShardedState) -> None:
        rank = self._everyone.rank
        try:
            if rank:  # rank 0 gets there when it completes the checkpoint
                hit("save", found.step)
            if any(pieces.values()) or not rank:
                found.part = write_part(found.draft, pieces, rank=rank)
        except OSError as error:
            found.error = unwritten(self._root, found.step, error, needed=found.needed, who=self._who)
        except BaseException as error:  # noqa: BLE001 - told to all ranks, and raised by each
            found.error = error

    def _complete(self, found: _UnderWay) -> None:
        self._under_way = None
        try:
            self._agreed(lambda: _raise(found.error))
            parts = all_gather_object(None if found.part is None else found.part.to_json(), self._everyone)
            self._agreed(
                lambda: self._commit(found, [CheckpointPart.from_json(part) for part in parts if part is not None])
            )
        finally:
            if self._completes:
                delete_temporary_folder(found.draft, self._owner)

    def _commit(self, found: _UnderWay, parts: list[CheckpointPart]) -> None:
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
                confirm=self._confirm,
            )
        except OSError as error:
            raise unwritten(self._root, found.step, error, needed=found.needed) from error
        self._finished.append(done)
        prune(self._root, self._retention, step=found.step, owner=self._owner)

    def _agreed(self, act: Callable[[], _T]) -> _T:
        """Do something; where it fails on one rank, it fails on all."""
        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # noqa: BLE001 - raised again, once the others know
            error = caught
        told = all_gather_object(None if error is None else str(error), self._everyone)
        if error is not None:
            raise error
        if failed := [text for text in told if text is not None]:
            raise CheckpointError(failed[0])
        return result  # type: ignore[return-value] # nothing was raised


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _refuse_unseen(folder: Path, rank: int) -> None:
    """Raise where this rank does not see what rank 0 has made."""
    deadline = time.monotonic() + _PATIENCE_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} does not see {folder}, which rank 0 made: each rank writes its own part of a checkpoint "
                "there. Give all hosts one run folder, by a file system that they share."
            )
        time.sleep(0.05)
