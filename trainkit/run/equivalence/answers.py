"""The answers of a proof."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.run.equivalence.comparing import Comparison, Verdict, worst
from trainkit.run.equivalence.sameness import Sameness


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The second answer: whether the numbers are the same at one common cut."""

    precision: str
    """The precision in which both were trained."""
    micro_size: int
    """The common cut: both were trained with this `batch.micro_size`."""
    steps: tuple[int, ...]
    """The updates after which both were compared: those after which the candidate's replicas are identical."""
    comparisons: tuple[Comparison, ...]
    gradients: tuple[Comparison, ...] = ()
    """The gradients of a probe compared with a plain loop's; empty if the strategy is another training by design."""
    explanation: tuple[str, ...] = ()
    """Lines that name the rule which the candidate breaks; empty if it breaks none."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the comparisons; gradients that differ make the numbers differ."""
        return worst([*self.comparisons, *(one for one in self.gradients if one.verdict == "different")])

    @property
    def first(self) -> Comparison | None:
        """The first difference: the earliest step, and in it the first parameter."""
        wrong = [one for one in self.comparisons if one.verdict == "different"]
        return min(wrong, key=lambda one: one.first_step or 0, default=None)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Both answers about one candidate."""

    label: str
    """The strategy as the user named it."""
    replicas: int
    sameness: Sameness | None
    """The first answer; None if only the second was requested."""
    numbers: Numbers
    """The second answer."""
    notes: tuple[str, ...] = ()
    """Notes for the user about this strategy and this model; `train` and `plan` print the same."""

    @property
    def holds(self) -> bool:
        """Whether every requested answer is yes."""
        same = self.sameness is None or self.sameness.verdict == "yes"
        return same and self.numbers.verdict != "different"
