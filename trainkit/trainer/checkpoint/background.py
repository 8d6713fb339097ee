"""Save in the background: a step waits for the copy to the host, a thread hashes and writes to the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.trainer.checkpoint.disk_space import bytes_needed, refuse_lack_of_room
from trainkit.trainer.checkpoint.retention import Retention
from trainkit.trainer.checkpoint.saving import save, untied
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.cleanup import owner_of
from trainkit.trainer.manifest import Checkpoint
from trainkit.trainer.ownership import OwnershipToken


class BackgroundSaver:
    """Saves one checkpoint at a time in a background thread.

    Host copies reuse their buffers, so that the second save allocates nothing; they take the memory of one checkpoint.
    A save that begins while the previous one is still being written waits for it. An error of the thread is raised by
    the next call of any method.
    """

    def __init__(
        self,
        root: Path,
        *,
        retention: Retention | None = None,
        background: bool = True,
        confirm: Callable[[], None] | None = None,
        owner: OwnershipToken | None = None,
    ) -> None:
        self._root = root
        self._owner = owner
        self._confirm = confirm
        self._retention = retention
        self._background = background
        self._snapshot = Snapshot()
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
        arguments: dict[str, Any] = {"step": step, "meta": meta, "metric": metric, "retention": self._retention}
        self._owner = self._owner or owner_of(self._root)
        arguments.update(confirm=self._confirm, owner=self._owner)
        if not self._background:
            self._finished.append(save(self._root, tensors=tensors, aliases=aliases, **arguments))
            return
        unique, tied = untied(tensors)
        refuse_lack_of_room(self._root, step, bytes_needed(unique.values()))
        arguments.update(tensors=self._snapshot.take(unique), aliases={**tied, **(aliases or {})})
        # A daemon: a second Ctrl-C ends now, and leaves a temporary folder that is never taken for a checkpoint.
        self._thread = threading.Thread(target=self._write, kwargs=arguments, name="checkpoint", daemon=True)
        self._thread.start()

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
            self._snapshot.buffers.clear()
        return self.finished()

    def _write(self, **arguments: Any) -> None:
        try:
            self._finished.append(save(self._root, **arguments))
        except BaseException as error:  # noqa: BLE001 - carried to the thread that trains
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
