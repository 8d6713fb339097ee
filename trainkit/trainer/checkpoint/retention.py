"""The rule which checkpoints are kept, and which are named last and best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainkit.trainer.checkpoint.evaluated_index import EvaluatedIndex, exclusive, swap_in
from trainkit.trainer.cleanup import delete, owner_of, set_aside_newer
from trainkit.trainer.manifest import Checkpoint, list_complete
from trainkit.trainer.ownership import OwnershipToken


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keeps the newest and the best checkpoints of a run, and deletes its others; those of other runs stay.

    Everything is derived from the manifests and the metrics of an evaluator: there is no state that could disagree with
    the folders.
    """

    keep_last: int | None = None
    """How many of the newest are kept, at least 1; None keeps all."""
    keep_best: int = 1
    """How many of the best are kept beyond those."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large metric is better."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError("keep_last must be 1 or more: a run without its last checkpoint cannot be resumed")

    def apply(self, root: Path, *, step: int, owner: OwnershipToken | None = None) -> None:
        """Delete what is not kept, and write the names into `root/index.json`; newer checkpoints of this run are set
        aside.
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
        """Write the metrics of an evaluator, and update the name of the best; deletes nothing."""
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
        """Return the checkpoints with a metric that is a number, best first; of equals the earlier one is better."""
        sign = -1.0 if self.mode == "max" else 1.0
        judged = [(sign * entry.metric, entry.step, entry) for entry in checkpoints if entry.metric is not None]
        judged = [item for item in judged if not math.isnan(item[0])]
        return [entry for _, _, entry in sorted(judged, key=lambda item: item[:2])]
