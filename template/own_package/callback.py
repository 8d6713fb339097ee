"""The callback: hooks that are called during a training."""

from collections.abc import Mapping
from typing import Annotated, Any

from trainkit import Callback, Row, Run, cosmetic


class Milestones(Callback):
    """Note in RUN/milestones.txt at which step `val/correct` first reached each mark."""

    # `cosmetic` declares that the key cannot change the result of a training.
    def __init__(self, marks: Annotated[list[float], cosmetic]) -> None:
        self.marks = marks
        self.reached: list[str] = []

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Compare the metric with the next marks."""
        for mark in self.marks[len(self.reached) :]:
            if metrics["val/correct"] < mark:
                break
            self.reached.append(f"{mark:.0%} at step {run.state.step}")
        if run.is_owner:  # one process writes
            (run.folder / "milestones.txt").write_text("\n".join([*self.reached, ""]), encoding="utf-8")

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs, as JSON."""
        return {"reached": self.reached}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.reached = list(saved["reached"])
