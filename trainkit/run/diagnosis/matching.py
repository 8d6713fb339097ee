"""Matching: which single cause reproduces all differences up to rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainkit.run.diagnosis.causes import Cause
from trainkit.run.diagnosis.differences import Difference, distance
from trainkit.run.diagnosis.evidence import Tensors

Hypothesis = tuple[Cause, str, Tensors]
"""(cause, its form, the predicted tensors)."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A prediction that equals the candidate's tensors up to rounding."""

    cause: Cause
    form: str
    name: str
    """The tensor that it fits worst."""
    step: int
    error: float
    """The relative error there."""


@dataclass
class Matching:
    """Keeps the causes that have reproduced every difference so far.

    Example:
        >>> import torch
        >>> from trainkit.run.diagnosis.causes import COUNTED_TWICE
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
