"""Compare the weights of two trainings by name, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Verdict = Literal["equal", "rounding", "different"]

_ULPS: Final = 4096.0
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
    found = {one.verdict for one in comparisons}
    if "different" in found:
        return "different"
    return "rounding" if "rounding" in found else "equal"


def is_rounding(expected: Mapping[int, Mapping[str, Tensor]], found: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Return whether two trainings differ by rounding only."""
    pairs = ((expected[number][name], one) for number, right in found.items() for name, one in right.items())
    return all(torch.equal(one, other) or _close(one, other, 0.0) for one, other in pairs)


def moved_by_rounding(rates: Iterable[float]) -> float:
    """Return how far rounding may move an element whose true gradient is zero: 1e-8 of the sum of the learning rates.

    Example:
        >>> moved_by_rounding([0.5, 0.5])
        1e-08
    """
    return 1e-8 * sum(rates)


def compare(
    expected: Mapping[int, Mapping[str, Tensor]],
    found: Mapping[int, Mapping[str, Tensor]],
    *,
    no_gradient: frozenset[str] = frozenset(),
    without_gradient: Mapping[str, Tensor] | None = None,
    allowed: float = 0.0,
    exact: bool = False,
) -> Iterator[Comparison]:
    """Compare tensors by name after every step that the candidate has.

    Args:
        expected: the reference: updates -> name -> tensor.
        found: the same for the candidate.
        no_gradient: names whose true gradient is zero.
        without_gradient: name -> mask of the elements whose true gradient is zero (the key bias of attention, which
            torch keeps in one parameter with two others).
        allowed: the absolute tolerance for both, and for buffers if the model has such parameters.
        exact: whether equal bits are promised, so that rounding is a difference.

    Example:
        >>> one, other = {"param/w": torch.ones(2)}, {"param/w": torch.ones(2) * 2}
        >>> [(item.verdict, item.first_step) for item in compare({1: one, 2: one}, {1: one, 2: other})]
        [('different', 2)]
    """
    # Batch statistics after a parameter without gradient inherit its rounding.
    loose = bool(no_gradient)
    masks = without_gradient or {}
    for name in next(iter(expected.values())):
        error, unequal, beyond = 0.0, None, None
        for number, right in found.items():
            one, other = expected[number][name], right[name]
            if torch.equal(one, other):
                continue
            unequal = unequal or number
            error = max(error, _relative(one, other))
            absolute = allowed if name in no_gradient or (loose and name.startswith("buffer/")) else 0.0
            if exact or not _close(one, _without(masks.get(name), one, other, allowed), absolute):
                beyond = beyond or number
        verdict: Verdict = "different" if beyond else "rounding" if unequal else "equal"
        yield Comparison(
            name=name,
            verdict=verdict,
            error=error,
            first_step=beyond or unequal,
            no_gradient=name in no_gradient,
        )


def _without(mask: Tensor | None, expected: Tensor, found: Tensor, allowed: float) -> Tensor:
    """Return the found tensor, with its masked elements replaced by the expected ones where they are close enough."""
    if mask is None:
        return found
    return torch.where(mask & ((found - expected).abs() <= allowed), expected, found)


def _relative(expected: Tensor, found: Tensor) -> float:
    one, other = expected.double(), found.double()
    scale = float(one.norm())
    return float((one - other).norm()) / scale if scale else float((one - other).norm())


def _close(expected: Tensor, found: Tensor, allowed: float) -> bool:
    if not expected.is_floating_point() or not torch.isfinite(found).all():
        return False
    if float((expected - found).abs().max()) <= allowed:
        return True
    return _relative(expected, found) <= _ULPS * torch.finfo(expected.dtype).eps
