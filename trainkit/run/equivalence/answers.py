"""Compute the answers of a proof; the first is whether two trainings, as a user would start them, are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainkit.config.identity import Difference, difference
from trainkit.run.equivalence.comparing import Comparison, Verdict, worst
from trainkit.run.planning.coupling import Coupling
from trainkit.run.planning.plan import RunPlan

_CUT: Final = ("batch.micro_size", "batch.accumulation")
"""Keys that cut a step into shards."""
_ROUNDED: Final = (
    "convert rounds products to eight bits by design: its contract is the curve of the loss, and the numbers below "
    "are those of the unconverted layers"
)
_ANOTHER: Final = "this strategy is a different training from that of one_device"


@dataclass(frozen=True, kw_only=True)
class Sameness:
    """Whether two trainings, as they would be started, are the same training."""

    verdict: Literal["yes", "no", "unknown"]
    reasons: tuple[str, ...]
    """The reasons, one line each."""
    remedy: str | None = None
    """The overrides with which both would be the same training, if only the cut differs: `batch.micro_size=32`."""


def same_training(
    reference: RunPlan, candidate: RunPlan, coupling: Callable[[], Coupling], *, accumulates: bool = False
) -> Sameness:
    """Compare two plans, as they would be started.

    They are the same training if the maths keys other than the cut are equal, and either the cut is equal, or the model
    and the objective neither draw random numbers nor couple the samples of a shard.
    """
    other = tuple(_other_keys(reference, candidate))
    if other:
        return Sameness(verdict="no", reasons=other)
    here, there = candidate.batch.micro_size, reference.batch.micro_size
    if here == there:
        return Sameness(verdict="yes", reasons=(f"both have batch.micro_size={here}, and no other maths key differs",))
    cut, found = f"batch.micro_size is {here} here and {there} under one_device", coupling()
    if found.depends_on_cut is False:
        neither = "the model and the objective neither draw random numbers nor couple the samples of a shard"
        return Sameness(verdict="yes", reasons=(f"{cut}, and {neither}",))
    remedy = f"batch.micro_size={here}"
    if accumulates:
        remedy += " instead of batch.accumulation"
    if found.depends_on_cut:
        return Sameness(verdict="no", reasons=(f"{cut}, and {found.text}",), remedy=remedy)
    return Sameness(verdict="unknown", reasons=(f"{cut}; coupling: not probed, {found.not_probed}",), remedy=remedy)


def _other_keys(reference: RunPlan, candidate: RunPlan) -> Iterator[str]:
    """Yield the differences other than the cut."""
    differing = [one for one in difference(reference.cfg, candidate.cfg) if one.matters and one.key not in _CUT]
    if any(one.key == "strategy._target_" for one in differing):  # its other keys belong to that difference
        differing = [one for one in differing if not one.key.startswith("strategy.")]
        yield _ANOTHER
    elif candidate.components.strategy.facts_in(candidate.context).changes_maths and not differing:
        yield _ANOTHER
    if candidate.cfg.convert:
        yield _ROUNDED
    yield from map(_named, differing)


def _named(one: Difference) -> str:
    if one.key.startswith("strategy."):
        return f"{one.key}={_null_or_value(one.right)} counts as maths, and one_device has no such key"
    return f"{one.key} is {_null_or_value(one.right)} here and {_null_or_value(one.left)} under one_device"


def _null_or_value(value: Any) -> Any:
    return "null" if value is None else value


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The second answer: whether the numbers are the same with equal shards."""

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
