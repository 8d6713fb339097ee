"""How far a training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Outcome, Status

__all__ = ["State"]


@dataclass(kw_only=True)
class State:
    """What a resumed run continues from, besides tensors."""

    plan: BatchPlan
    """How steps are cut."""
    step: int = 0
    """Updates completed."""
    seconds: float = 0.0
    """Seconds of training, over all attempts; evaluation and saving left out."""
    best: float | None = None
    """The best `eval.metric` so far."""
    retries: int = 0
    """Tries at a step that overflowed."""
    skipped: int = 0
    """Steps left out by policy."""

    @property
    def epoch(self) -> float:
        """Passes over the dataset, counting parts: samples used over samples there are."""
        return self.samples / self.plan.num_samples

    @property
    def samples(self) -> int:
        """Samples used."""
        return self.plan.samples_before(self.step)

    def advance(self, outcome: Outcome) -> bool:
        """Take note of a try at a step; whether it is done with.

        An applied step and one left out by policy are; an overflowed one comes again, one handed out is under way.
        """
        if outcome.status is Status.handed_out:
            return False
        if outcome.status is Status.retry:
            self.retries += 1
            return False
        if outcome.status is Status.skipped:
            self.skipped += 1
        self.step += 1
        return True

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        counted = ("step", "seconds", "best", "retries", "skipped")
        return {name: getattr(self, name) for name in counted}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `to_json` gave."""
        for name, value in saved.items():
            setattr(self, name, value)
