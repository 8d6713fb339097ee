"""Count the steps that a training leaves out because their loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.config.sections import NumericsConfig
from trainkit.errors import NonFiniteError
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import LeftOut

REMEDY: Final = "Lower optimizer.lr, set clip.max_norm or add warmup.steps"
"""Remedy for losses or gradients that are not finite; the beginning of a sentence."""
_MOST_STEPS: Final = 1000
"""Number of steps that are listed; further ones are only counted."""
_MOST_SAMPLES: Final = 256
"""Number of samples that are listed per step."""
_FIRST_JUDGED: Final = 100
"""The share of skipped steps is checked from this step on."""


class RollbackNeeded(Exception):  # noqa: N818 - a request to the session, never shown to users
    """A step is not finite for the first time: restore the last checkpoint, and train up to it again."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A step that was not finite, and that is trained again."""

    step: int
    """Number of updates before this step."""
    checkpoint: int
    """Step of the checkpoint that was restored."""


@dataclass
class LeftOutSteps:
    """Counts the skipped steps, and ends a run that skips too many; the same on every rank."""

    settings: NumericsConfig
    samples_in: Callable[[Ticket], Sequence[int]]
    """Returns the samples of a ticket."""
    count: int = 0
    """Number of skipped steps."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """`step`, `samples` and `num_samples` of each skipped step, as in result.json."""
    first: int = -1
    """The first of the latest consecutive skipped steps."""
    last: int = -1
    """The last of the latest consecutive skipped steps."""
    suspect: Suspect | None = None
    """The step for which the last checkpoint was restored, with `rollback`."""

    def samples_of(self, tickets: Sequence[Ticket], most: int = _MOST_SAMPLES) -> tuple[list[int], int]:
        """Return the first samples of tickets, and the number of all."""
        found = [int(sample) for ticket in tickets for sample in self.samples_in(ticket)]
        return found[:most], len(found)

    def take(self, found: LeftOut) -> None:
        """Count a skipped step, or request that it is trained again.

        Raises:
            NonFiniteError: too many consecutive steps are skipped; with `rollback`, a second step since the restored
                checkpoint.
            RollbackNeeded: with `rollback`, the step was not finite for the first time.
        """
        step, suspect, limit = found.step, self.suspect, self.settings.max_skips_in_a_row
        if self.settings.on_nonfinite == "rollback":
            if suspect is None:
                raise RollbackNeeded(step)
            if suspect.step != step:
                raise NonFiniteError(
                    f"numerics.on_nonfinite=rollback: loss or gradient of step {step} is not finite, as in step "
                    f"{suspect.step}; both follow the checkpoint of step {suspect.checkpoint}, and at most one such "
                    f"step between two checkpoints is left out. {REMEDY}, save more often with "
                    "checkpoint.every_steps, or use numerics.on_nonfinite=skip."
                )
        self.first = self.first if self.count and step == self.last + 1 else step
        self.last, self.count = step, self.count + 1
        if len(self.steps) < _MOST_STEPS:
            samples, total = self.samples_of(found.tickets)
            self.steps.append({"step": step, "samples": samples, "num_samples": total})
        if self.settings.on_nonfinite == "skip" and self.last - self.first + 1 >= limit:
            raise NonFiniteError(
                f"numerics.max_skips_in_a_row={limit}: steps {self.first} to {step} were left out in a row, "
                f"because loss or gradient was not finite; {self._so_far(step + 1)}. {REMEDY}, see "
                f"the samples under skipped_steps in result.json, or raise numerics.max_skips_in_a_row."
            )

    def judge_share(self, step: int) -> None:
        """End the run if more steps were skipped than allowed.

        Raises:
            NonFiniteError: their share is above `numerics.max_skipped_share`.
        """
        limit = self.settings.max_skipped_share
        if self.settings.on_nonfinite != "skip" or step < _FIRST_JUDGED or self.count / step <= limit:
            return
        raise NonFiniteError(
            f"numerics.max_skipped_share={limit:g}: {self._so_far(step)}, because loss or gradient was not finite: a "
            f"share of {self.count / step:.3g} (steps {listed([one['step'] for one in self.steps], self.count)}). "
            f"{REMEDY}, see the samples under skipped_steps in result.json, or raise numerics.max_skipped_share."
        )

    def train_again(self, suspect: Suspect | None) -> None:
        """Record the step that is trained for the second time; None if no step is."""
        self.suspect = suspect

    def saved(self, step: int) -> None:
        """Clear the suspect when a checkpoint of a later step is saved."""
        if self.suspect is not None and step > self.suspect.step:
            self.suspect = None

    def findings(self) -> dict[str, Any]:
        """Return the entries of result.json: each step with its samples, and the number of unlisted steps."""
        rest = self.count - len(self.steps)
        return {"skipped_steps": list(self.steps), **({"skipped_steps_not_listed": rest} if rest else {})}

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "first": self.first, "last": self.last, "steps": list(self.steps)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `to_json` returned."""
        self.count, self.first, self.last = saved["count"], saved["first"], saved["last"]
        self.steps = list(saved["steps"])

    def _so_far(self, step: int) -> str:
        were = "was" if self.count == 1 else "were"
        return f"{self.count} of {step} steps {were} left out"


def listed(numbers: Sequence[int], count: int, *, most: int = 8) -> str:
    """Return numbers for a sentence, only the first few of many.

    Example:
        >>> listed([3, 4], 2), listed([5], 1), listed(list(range(20)), 30)
        ('3, 4', '5', '0, 1, 2, 3, 4, 5, 6, 7 and 22 more')
    """
    shown = ", ".join(map(str, numbers[:most]))
    more = count - min(len(numbers), most)
    return f"{shown} and {more} more" if more > 0 else shown
