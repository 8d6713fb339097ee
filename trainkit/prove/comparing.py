"""Compare two trainings: their plans by the keys that matter, and their weights by name, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from trainkit.config.identity import difference
from trainkit.run.planning.notes import Coupling
from trainkit.run.planning.plan import RunPlan

Verdict = Literal["equal", "rounding", "different"]

ULPS: Final = 4096.0
"""Tolerance, in units in the last place, for ten steps of sums in another order: 9e-13 in float64, 5e-4 in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of one parameter or buffer with the reference, over all steps."""

    name: str
    """`param/...` or `buffer/...`."""
    verdict: Verdict
    error: float
    """The largest relative error of any step, |a - b| / |b| in the 2-norm."""
    first_step: int | None
    """The first step after which some bit differs; for `different`, the first beyond rounding."""
    no_gradient: bool = False
    """Whether the true gradient is zero; the tolerance is then 1e-8 of the sum of the learning rates."""


def worst(comparisons: Iterable[Comparison]) -> Verdict:
    """Return the worst verdict of some comparisons."""
    return max((item.verdict for item in comparisons), key=("equal", "rounding", "different").index, default="equal")


def is_rounding(expected: Mapping[int, Mapping[str, Tensor]], actual: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Return whether two trainings differ by rounding only."""
    pairs = ((expected[step][name], value) for step, tensors in actual.items() for name, value in tensors.items())
    return all(torch.equal(left, right) or _close(left, right, 0.0) for left, right in pairs)


def moved_by_rounding(rates: Iterable[float]) -> float:
    """Return how far rounding may move an element whose true gradient is zero: 1e-8 of the sum of the learning rates.

    Example:
        >>> moved_by_rounding([0.5, 0.5])
        1e-08
    """
    return 1e-8 * sum(rates)


def compare(
    expected: Mapping[int, Mapping[str, Tensor]],
    actual: Mapping[int, Mapping[str, Tensor]],
    *,
    no_gradient: frozenset[str] = frozenset(),
    without_gradient: Mapping[str, Tensor] | None = None,
    allowed: float = 0.0,
    exact: bool = False,
) -> Iterator[Comparison]:
    """Compare tensors by name after every step that the candidate has.

    Args:
        expected: the reference: updates -> name -> tensor.
        actual: the same for the candidate.
        no_gradient: names whose true gradient is zero.
        without_gradient: name -> mask of the elements whose true gradient is zero (the key bias of attention, which
            torch keeps in one parameter with two others).
        allowed: the absolute tolerance for both, and for buffers if the model has such parameters.
        exact: whether equal bits are promised, so that rounding is a difference.

    Example:
        >>> ones, twos = {"param/w": torch.ones(2)}, {"param/w": torch.ones(2) * 2}
        >>> [(item.verdict, item.first_step) for item in compare({1: ones, 2: ones}, {1: ones, 2: twos})]
        [('different', 2)]
    """
    # Batch statistics after a parameter without gradient inherit its rounding.
    loose = bool(no_gradient)
    masks = without_gradient or {}
    for name in next(iter(expected.values())):
        error, unequal, beyond = 0.0, None, None
        for step, tensors in actual.items():
            left, right = expected[step][name], tensors[name]
            if torch.equal(left, right):
                continue
            unequal = unequal or step
            error = max(error, _relative(left, right))
            absolute = allowed if name in no_gradient or (loose and name.startswith("buffer/")) else 0.0
            if (mask := masks.get(name)) is not None:  # such elements may move by rounding
                right = torch.where(mask & ((right - left).abs() <= allowed), left, right)
            if exact or not _close(left, right, absolute):
                beyond = beyond or step
        verdict: Verdict = "different" if beyond else "rounding" if unequal else "equal"
        yield Comparison(
            name=name, verdict=verdict, error=error, first_step=beyond or unequal, no_gradient=name in no_gradient
        )


def _relative(expected: Tensor, actual: Tensor) -> float:
    expected, actual = expected.double(), actual.double()
    return float((expected - actual).norm()) / (float(expected.norm()) or 1.0)


def _close(expected: Tensor, actual: Tensor, allowed: float) -> bool:
    if not expected.is_floating_point() or not torch.isfinite(actual).all():
        return False
    if float((expected - actual).abs().max()) <= allowed:
        return True
    return _relative(expected, actual) <= ULPS * torch.finfo(expected.dtype).eps


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
    reasons = tuple(_other_keys(reference, candidate))
    if reasons:
        return Sameness(verdict="no", reasons=reasons)
    size, expected = candidate.batch.micro_size, reference.batch.micro_size
    if size == expected:
        return Sameness(verdict="yes", reasons=(f"both have batch.micro_size={size}, and no other maths key differs",))
    cut, probed = f"batch.micro_size is {size} here and {expected} under one_device", coupling()
    if probed.depends_on_cut is False:
        neither = "the model and the objective neither draw random numbers nor couple the samples of a shard"
        return Sameness(verdict="yes", reasons=(f"{cut}, and {neither}",))
    remedy = f"batch.micro_size={size}"
    if accumulates:
        remedy += " instead of batch.accumulation"
    if probed.depends_on_cut:
        return Sameness(verdict="no", reasons=(f"{cut}, and {probed.text}",), remedy=remedy)
    return Sameness(verdict="unknown", reasons=(f"{cut}; coupling: not probed, {probed.not_probed}",), remedy=remedy)


def _other_keys(reference: RunPlan, candidate: RunPlan) -> Iterator[str]:
    """Yield the differences other than the cut."""
    differing = [diff for diff in difference(reference.cfg, candidate.cfg) if diff.matters and diff.key not in _CUT]
    if any(diff.key == "strategy._target_" for diff in differing):  # its other keys belong to that difference
        differing = [diff for diff in differing if not diff.key.startswith("strategy.")]
        yield _ANOTHER
    elif candidate.components.strategy.facts_in(candidate.context).changes_maths and not differing:
        yield _ANOTHER
    if candidate.cfg.convert:
        yield _ROUNDED
    for diff in differing:
        right, left = ("null" if value is None else value for value in (diff.right, diff.left))
        if diff.key.startswith("strategy."):
            yield f"{diff.key}={right} counts as maths, and one_device has no such key"
        else:
            yield f"{diff.key} is {right} here and {left} under one_device"


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
    losses: Comparison | None = None
    """The losses of all steps; None: not compared."""
    begins: Comparison | None = None
    """The first initial weight whose bits differ, or the last weight; None: not compared."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the comparisons; gradients and losses that differ make the numbers differ."""
        extra = [*self.gradients, *(comparison for comparison in (self.losses, self.begins) if comparison is not None)]
        return worst([*self.comparisons, *(comparison for comparison in extra if comparison.verdict == "different")])

    @property
    def first(self) -> Comparison | None:
        """The first difference: the earliest step, and in it the first parameter."""
        wrong = [comparison for comparison in self.comparisons if comparison.verdict == "different"]
        return min(wrong, key=lambda comparison: comparison.first_step or 0, default=None)


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
