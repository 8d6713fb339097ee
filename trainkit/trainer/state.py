"""How far a training is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkit.config.schema import NumericsConfig
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Status, StepOutcome
from trainkit.trainer.left_out import LeftOutSteps

__all__ = ["State"]


@dataclass(kw_only=True)
class State:
    """What a resumed run continues from, besides tensors."""

    plan: BatchPlan
    """How steps are cut."""
    step: int = 0
    """Updates completed, and steps left out."""
    seconds: float = 0.0
    """Seconds of training, over all attempts; evaluation and saving left out."""
    best: float | None = None
    """The best `eval.metric` so far."""
    retries: int = 0
    """Tries at a step that overflowed."""
    left_out: LeftOutSteps = field(default_factory=lambda: LeftOutSteps(NumericsConfig(), lambda _ticket: ()))
    """Steps left out because they are not finite."""

    @property
    def epoch(self) -> float:
        """Passes over the dataset, counting parts: samples used over samples there are."""
        return self.samples / self.plan.num_samples

    @property
    def samples(self) -> int:
        """Samples used."""
        return self.plan.samples_before(self.step)

    @property
    def skipped(self) -> int:
        """Steps left out."""
        return self.left_out.count

    def advance(self, outcome: StepOutcome) -> bool:
        """Take note of a try at a step; whether it is done with.

        An applied step and one left out by policy are; an overflowed one comes again, one handed out is under way.

        Raises:
            NonFiniteError: too many steps are left out.
            RollbackNeeded: the step is to be trained again, from the last checkpoint on.
        """
        if outcome.status is Status.handed_out:
            return False
        if outcome.status is Status.retry:
            self.retries += 1
            return False
        self.step += 1
        for one in outcome.left_out:
            self.left_out.take(one)
        if self.left_out.count:
            self.left_out.judge_share(self.step)
        return True

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        counted = {name: getattr(self, name) for name in ("step", "seconds", "best", "retries")}
        return {**counted, "left_out": self.left_out.to_json()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `to_json` gave, also in an earlier version, which counted the steps left out alone."""
        for name in ("step", "seconds", "best", "retries"):
            setattr(self, name, saved[name])
        self.left_out.restore(saved.get("left_out", {"count": saved.get("skipped", 0)}))
