"""Choose the checkpoints to keep, name the last and the best one, and index the evaluated ones."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from trainkit.errors import UnreadableError
from trainkit.files import read_map
from trainkit.trainer.cleanup import delete, owner_of, set_aside_newer
from trainkit.trainer.manifest import Checkpoint, list_complete
from trainkit.trainer.ownership import OwnershipToken


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

    def apply(self, root: Path, *, step: int, owner: OwnershipToken | None = None) -> None:
        """Delete the other checkpoints, and write the names into `root/index.json`; newer checkpoints of this run are
        set aside.
        """
        owner = owner or owner_of(root)
        with exclusive(root) as held:
            set_aside_newer(root, owner, step=step)
            judged = EvaluatedIndex.read(root)
            newest = [judged.of(entry) for entry in list_complete(root) if owner.wrote(entry.owner)]
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
        best = self.ranked(newest)
        names = {
            "last": newest[0].folder.name if newest else None,
            "best": best[0].folder.name if best else None,
        }
        swap_in(root / "index.json", names)

    def ranked(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints with a metric that is a number, best first; of equal ones the earlier is better."""
        sign = -1.0 if self.mode == "max" else 1.0
        judged = [(sign * entry.metric, entry.step, entry) for entry in checkpoints if entry.metric is not None]
        judged = [item for item in judged if not math.isnan(item[0])]
        return [entry for _, _, entry in sorted(judged, key=lambda item: item[:2])]


_NAME: Final = "evaluated.json"
_LOCK_TIMEOUT_S: Final = 1.0
"""Seconds that the training waits for an evaluator that was stopped while it held the lock."""


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
            content = read_map(root / _NAME, {"metrics": dict, "evaluating": (str, type(None))})
        except UnreadableError:
            return cls()
        metrics = {name: float(value) for name, value in content["metrics"].items() if isinstance(value, int | float)}
        return cls(evaluating=content["evaluating"], metrics=metrics)

    def write(self, root: Path) -> None:
        """Write the file; a reader sees either the old one or the new one."""
        metrics = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        swap_in(root / _NAME, {"evaluating": self.evaluating, "metrics": metrics})

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with its metric, if its own manifest has none."""
        if checkpoint.metric is not None:
            return checkpoint
        return replace(checkpoint, metric=self.metrics.get(checkpoint.folder.name))


def swap_in(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is derived from others, atomically: a reader sees either the old one or the new one."""
    temporary = path.with_name(f".tmp_{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[bool]:
    """Lock the `checkpoints` folder against the other process that uses it, if any.

    Yields:
        Whether the lock is held; False: the other process holds it, or the file system has no locks.
    """
    if not (root / _NAME).exists():
        yield True
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)  # this releases the lock


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True
