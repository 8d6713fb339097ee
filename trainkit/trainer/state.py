"""The progress of a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkit.config.sections import NumericsConfig
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Status, StepOutcome
from trainkit.trainer.left_out import LeftOutSteps


@dataclass(kw_only=True)
class State:
    """The state that a resumed run continues from, besides tensors."""

    plan: BatchPlan
    """How steps are cut."""
    step: int = 0
    """Updates completed, and steps skipped."""
    seconds: float = 0.0
    """Seconds of training, over all attempts; without evaluation and saving."""
    best: float | None = None
    """The best `eval.metric` so far."""
    retries: int = 0
    """Repetitions of steps that overflowed."""
    left_out: LeftOutSteps = field(default_factory=lambda: LeftOutSteps(NumericsConfig(), lambda _ticket: ()))
    """Steps skipped because they are not finite."""

    @property
    def epoch(self) -> float:
        """Passes over the dataset, including fractions: samples used divided by the size of the dataset."""
        return self.samples / self.plan.num_samples

    @property
    def samples(self) -> int:
        """Samples used."""
        return self.plan.samples_before(self.step)

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return self.left_out.count

    def advance(self, outcome: StepOutcome) -> bool:
        """Record the outcome of a step; return whether the step is completed.

        An applied step and one skipped by policy are; an overflowed step is repeated, and an asynchronous one is in
        flight.

        Raises:
            NonFiniteError: too many steps are skipped.
            RollbackNeeded: the step must be trained again, from the last checkpoint on.
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
        """Return the state for a checkpoint."""
        counted = {name: getattr(self, name) for name in ("step", "seconds", "best", "retries")}
        return {**counted, "left_out": self.left_out.to_json()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `to_json` returned; earlier versions only stored the number of skipped steps."""
        for name in ("step", "seconds", "best", "retries"):
            setattr(self, name, saved[name])
        self.left_out.restore(saved.get("left_out", {"count": saved.get("skipped", 0)}))
