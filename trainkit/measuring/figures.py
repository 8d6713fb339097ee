"""The figures of a choice over its turns: medians and their spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from trainkit.measuring.turns import Turn
from trainkit.trainer.metrics_accumulator import PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of some turns, with the least and the greatest of them.

    Example:
        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
    """

    median: float
    """Median over the turns."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(median=median(values), low=min(values), high=max(values))


@dataclass(kw_only=True)
class Choice:
    """One choice of a measurement, and the measurements of its turns."""

    label: str
    """The arguments that distinguish it from the other choices."""
    turns: list[Turn] = field(default_factory=list)
    """The turns that count, in their order."""
    cold: Turn | None = None
    """The turn before the first round, which does not count; None if there was none."""
    failure: str = ""
    """Reason why a turn failed; empty if none did."""

    def add(self, turn: Turn) -> None:
        """Add the measurement of a turn."""
        self.failure = turn.failure
        if turn.figures:
            self.turns.append(turn)

    @property
    def is_measured(self) -> bool:
        """Whether a turn has measured a step."""
        return not self.failure and any(turn.figures.get("steps") for turn in self.turns)

    def over(self, value: Callable[[Mapping[str, Any]], float | None]) -> Spread | None:
        """Return the spread of a value over the figures of the turns; None if no turn has it."""
        found = [one for turn in self.turns if turn.figures.get("steps") and (one := value(turn.figures)) is not None]
        return Spread.of(found) if found else None

    @property
    def samples_per_s(self) -> Spread | None:
        """Samples per second over all replicas."""
        return self.over(lambda one: one["samples"] / one["seconds"])

    @property
    def targets_per_s(self) -> Spread | None:
        """Targets per second, if a sample has several (tokens), or a weight other than 1; else None."""
        if all(one.figures.get("targets") == one.figures.get("samples") for one in self.turns):
            return None
        return self.over(lambda one: one["targets"] / one["seconds"])

    @property
    def step_s(self) -> Spread | None:
        """Seconds per step."""
        return self.over(lambda one: one["seconds"] / one["steps"])

    def part_s(self, part: str) -> Spread | None:
        """Return the seconds per step of one part of a step, the mean over ranks; `rest` is the time that belongs to no
        part.
        """
        return self.over(lambda one: parts_of(one)[part])

    @property
    def joules_per_sample(self) -> Spread | None:
        """Energy of the devices per sample, in joules; None if no device reports it."""
        return self.over(lambda one: None if one.get("joules") is None else one["joules"] / one["samples"])

    @property
    def peak_bytes(self) -> int:
        """The most memory of a process, in bytes."""
        return max((turn.figures["peak_bytes"] for turn in self.turns if turn.figures), default=0)

    @property
    def start_s(self) -> Spread | None:
        """Seconds from the start of the process to the beginning of the first step."""
        found = [turn.start_s for turn in self.turns if turn.figures]
        return Spread.of(found) if found else None

    @property
    def first_step_s(self) -> Spread | None:
        """Seconds of the first step: it compiles, allocates and opens connections."""
        return self.over(lambda one: one["first_step_s"])

    @property
    def step_spread(self) -> Spread | None:
        """Standard deviation of the steps of rank 0 divided by their median."""
        return self.over(lambda one: one["step_spread"])

    @property
    def compile_s(self) -> Spread | None:
        """Seconds in which torch.compile worked."""
        return self.over(lambda one: one["compile_s"])

    @property
    def until_s(self) -> Spread | None:
        """Seconds of training until the result of `--until`; None if a turn has not reached it."""
        found = [turn.figures.get("until") for turn in self.turns]
        if not found or None in found:
            return None
        return Spread.of([one["seconds"] for one in found if one is not None])


def parts_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds per step of each part, the mean over ranks, and of the rest of a step.

    Example:
        >>> parts_of({"steps": 2, "seconds": 2.0, "ranks": [dict.fromkeys(PARTS, 0.3)]})["rest"]
        0.25
    """
    steps, ranks = figures["steps"], figures["ranks"]
    found = {part: sum(rank[part] for rank in ranks) / len(ranks) / steps for part in PARTS}
    return {**found, "rest": max(figures["seconds"] / steps - sum(found.values()), 0.0)}
