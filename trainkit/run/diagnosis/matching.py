"""The faults that a diagnosis can name, and which single one reproduces all differences up to rounding.

A difference is one beyond rounding between one step of a candidate and the plain loop's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from trainkit.run.diagnosis.evidence import Expected, Tensors

ULPS: Final = 4096.0
"""Tolerance, in units in the last place, of a sum in another order: 9e-13 in float64, 5e-4 in float32."""
_COPIES: Final = 8.0
"""Additional tolerance for an update, in units in the last place of the parameter: it is rounded a few times."""
_NO_GRADIENT: Final = 1e-12
"""A gradient below this fraction of the model's norm is zero except for rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tensors of one step that differ beyond rounding."""

    step: int
    found: Tensors
    """The tensors of the candidate that differ."""
    expected: Tensors
    """The same tensors of the plain loop."""
    allowed: Mapping[str, float]
    """The norm of a difference that counts as rounding, by name."""


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, in float64 on the host; NaN or infinite if a tensor is not finite."""
    return float((one.detach().cpu().double() - other.detach().cpu().double()).norm())


def norm(tensor: Tensor | None) -> float:
    """Return the norm of a tensor, 0 for None."""
    return 0.0 if tensor is None else float(tensor.detach().double().norm())


def _epsilon(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def differing_gradients(
    step: int, expected: Expected, found: Tensors, *, errors: dict[str, float], read_from: Tensors | None, rate: float
) -> Difference | None:
    """Compare the gradients of a step; None if all are equal up to rounding.

    Args:
        step: the step.
        expected: the result of the plain loop.
        found: the gradients of the candidate.
        errors: mapping that receives the relative error of each parameter.
        read_from: the parameters whose difference gave the gradient; None: the gradient itself was saved.
        rate: the learning rate that this difference was divided by.
    """
    whole = sum(scale**2 for scale in expected.scale.values()) ** 0.5
    allowed: dict[str, float] = {}
    wrong: list[str] = []
    full = {name: expected.gradient.get(name, torch.zeros_like(grad)) for name, grad in found.items()}
    for name, grad in found.items():
        scale = expected.scale.get(name, 0.0)
        epsilon = _epsilon(grad)
        allowed[name] = max(ULPS * epsilon * scale, _NO_GRADIENT * whole)
        if read_from is not None:
            allowed[name] += 4 * epsilon * norm(read_from[f"param/{name}"]) / rate
        off = distance(full[name], grad)
        errors[name] = off / (scale if scale > _NO_GRADIENT * whole else whole) if off else 0.0
        if not off <= allowed[name]:
            wrong.append(name)
    return _difference(step, wrong, found, full, allowed)


def differing_buffers(step: int, expected: Tensors, found: Tensors) -> Difference | None:
    """Compare the buffers after a step; None if all are equal up to rounding."""
    allowed = {
        name: ULPS * _epsilon(tensor) * norm(tensor) if tensor.is_floating_point() else 0.0
        for name, tensor in expected.items()
    }
    wrong = [name for name, tensor in expected.items() if not distance(tensor, found[name]) <= allowed[name]]
    return _difference(step, wrong, found, expected, allowed)


def differing_parameters(
    step: int, expected: Tensors, *, before: Tensors, found: Tensors, skipped: Iterable[str]
) -> Difference | None:
    """Compare the parameters after one update from the same checkpoint; None if all are equal up to rounding.

    `skipped` are parameters without a gradient, whose update is rounding.
    """
    left_out = frozenset(skipped)
    allowed = {
        name: _epsilon(tensor) * (_COPIES * norm(tensor) + ULPS * distance(tensor, before[name]))
        for name, tensor in expected.items()
    }
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in left_out and not distance(tensor, found[name]) <= allowed[name]
    ]
    return _difference(step, wrong, found, expected, allowed)


def _difference(
    step: int, wrong: list[str], found: Tensors, expected: Tensors, allowed: Mapping[str, float]
) -> Difference | None:
    if not wrong:
        return None
    return Difference(
        step=step,
        found={name: found[name] for name in wrong},
        expected={name: expected[name] for name in wrong},
        allowed={name: allowed[name] for name in wrong},
    )


_TITLES: Final = {
    3: ("gradient", "3-gradient"),
    4: ("randomness and buffers", "4-randomness-and-buffers"),
    5: ("order of summation", "5-order-of-summation"),
    6: ("learning rate", "6-learning-rate"),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault, described in words."""

    rule: int
    """The point of docs/numbers.md that it breaks."""
    words: str
    parts_replicas: bool = False
    """Whether the replicas diverge after the first step, so that later steps cannot be predicted."""

    @property
    def title(self) -> str:
        """The rule by number and name."""
        return f"rule {self.rule} ({_TITLES[self.rule][0]})"

    @property
    def page(self) -> str:
        """The page and anchor that define the rule."""
        return f"docs/numbers.md#{_TITLES[self.rule][1]}"


MEAN_OF_MEANS: Final = Cause(3, "the mean of the shards' means")
NOT_REDUCED: Final = Cause(3, "the gradient of one replica, not added to that of the others", parts_replicas=True)
COUNTED_TWICE: Final = Cause(3, "the sum of the gradients, added up again")
AVERAGED: Final = Cause(3, "the average of the shards' gradients instead of their sum")
LAYOUT: Final = Cause(3, "the memory of the gradient is read as contiguous, against the parameter's strides")
CLIPPED_APART: Final = Cause(3, "gradients clipped before they are added up")
NOT_CLIPPED: Final = Cause(3, "the gradient is not clipped")
DRAWN_ALIKE: Final = Cause(4, "random numbers are keyed without the shard: every shard draws those of shard 0")
BUFFERS_OF_ONE: Final = Cause(4, "the buffers of one replica, not averaged with those of the others")
BUFFERS_UNWEIGHTED: Final = Cause(
    4, "the buffers of shards averaged with equal weights, whatever their numbers of samples"
)
EVERY_SHARD_MOVES: Final = Cause(4, "the buffers are updated once per shard instead of once per step")
ORDER: Final = Cause(5, "numerics.reproducible=true promises equal bits, and they are equal to rounding only")
RATE: Final = Cause(6, "the learning rate is multiplied or divided by the number of replicas or shards")
DECAY_PER_SHARD: Final = Cause(6, "weight decay acts once per shard or once per replica instead of once per step")
NOT_DECAYED: Final = Cause(6, "weight decay does not act")
STATE_LOST: Final = Cause(6, "the optimizer forgets its state between steps")


Hypothesis = tuple[Cause, str, Tensors]
"""(cause, its form, the predicted tensors)."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A prediction that equals the candidate's tensors up to rounding."""

    cause: Cause
    form: str
    name: str
    """The tensor with the largest error."""
    step: int
    error: float
    """The relative error of that tensor."""


@dataclass
class Matching:
    """Keeps the causes that have reproduced every difference so far.

    Example:
        >>> import torch
        >>> from trainkit.run.diagnosis.matching import COUNTED_TWICE
        >>> one = {"w": torch.ones(2)}
        >>> two = {"w": torch.ones(2) * 2}
        >>> matching = Matching()
        >>> matching.add(Difference(step=0, found=two, expected=one, allowed={"w": 1e-6}), [(COUNTED_TWICE, "", two)])
        >>> [match.cause.rule for match in matching.matches]
        [3]
    """

    differences: int = 0
    """Steps that differ and were tested."""
    tested: list[Cause] = field(default_factory=list)
    """Every cause that was tested."""
    _standing: dict[tuple[Cause, str], Match] = field(default_factory=dict)

    def add(self, difference: Difference, hypotheses: Iterable[Hypothesis]) -> None:
        """Test hypotheses on the differences of one more step."""
        found: dict[tuple[Cause, str], Match] = {}
        for cause, form, predicted in hypotheses:
            self.tested.append(cause)
            match = _match(difference, cause, form, predicted)
            if match is not None:
                known = found.get((cause, form))
                found[cause, form] = match if known is None or match.error < known.error else known
        if self.differences == 0:
            self._standing = found
        else:
            kept = {key for key in self._standing if key in found or key[0].parts_replicas}
            self._standing = {key: _worse(self._standing[key], found.get(key)) for key in kept}
        self.differences += 1

    @property
    def matches(self) -> list[Match]:
        """One match for each cause that reproduces every difference."""
        best: dict[Cause, Match] = {}
        for match in self._standing.values():
            known = best.get(match.cause)
            if known is None or match.error < known.error:
                best[match.cause] = match
        return list(best.values())


def _worse(one: Match, other: Match | None) -> Match:
    return one if other is None or other.error <= one.error else other


def _match(difference: Difference, cause: Cause, form: str, predicted: Tensors) -> Match | None:
    """Return the match if a prediction fits all differences, and differs from the expected tensors."""
    worst, where = 0.0, ""
    for name, found in difference.found.items():
        if name not in predicted:
            return None
        allowed = difference.allowed[name]
        off = distance(predicted[name], found)
        if not off <= allowed or not distance(predicted[name], difference.expected[name]) > allowed:
            return None
        error = off / (float(found.double().norm()) or 1.0)
        if error >= worst or not where:
            worst, where = error, name
    return Match(cause=cause, form=form, name=where, step=difference.step, error=worst)
