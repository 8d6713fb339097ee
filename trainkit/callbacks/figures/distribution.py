"""The distribution of the values of tensors: counts in buckets that are the same everywhere, so that they add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

_PER_OCTAVE: Final = 4
_LOW, _HIGH = -40, 40
"""Magnitudes from 2^-40 (9e-13) to 2^40; smaller and larger ones are in the first and the last bucket."""
_SIDE: Final = (_HIGH - _LOW) * _PER_OCTAVE
"""Buckets of the positive values; the negative ones have as many."""
_ZERO: Final = _SIDE
_NONFINITE: Final = 2 * _SIDE + 1
NUM_COUNTS: Final = _NONFINITE + 1
"""Counts of a distribution: negative values, zero, positive values, values that are not finite."""
_SUMS: Final = 2
_CHUNK: Final = 1 << 22
"""Number of values that are sorted into buckets at once; bounds the temporary memory for a large tensor."""
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def measure(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Count the values of a tensor, on its device.

    Args:
        tensor: of any shape and floating dtype; of a sparse one, the values that it holds.

    Returns:
        (NUM_COUNTS + 2,) float64, which adds up over tensors: counts, the sum of the finite values and of their
        squares; and (2,) float64, the least and the largest finite value, infinite ones if there is none.

    Example:
        >>> sums, extrema = measure(torch.tensor([0.0, 1.0, -3.0, float("nan")]))
        >>> int(sums[:NUM_COUNTS].sum()), sums[-2:].tolist(), extrema.tolist()
        (4, [-2.0, 10.0], [-3.0, 1.0])
    """
    values = (tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()).reshape(-1)
    sums = torch.zeros(NUM_COUNTS + _SUMS, dtype=torch.float64, device=values.device)
    extrema = torch.tensor([math.inf, -math.inf], dtype=torch.float64).to(values.device)
    for chunk in torch.split(values, _CHUNK) if values.numel() else ():
        part = chunk if chunk.dtype is torch.float64 else chunk.float()
        finite = torch.isfinite(part)
        clean = torch.where(finite, part, 0.0)
        octaves = torch.log2(clean.abs()).mul_(_PER_OCTAVE).floor_().clamp_(_LOW * _PER_OCTAVE, _HIGH * _PER_OCTAVE - 1)
        place = octaves.to(torch.int64).sub_(_LOW * _PER_OCTAVE)
        place = torch.where(clean > 0, _ZERO + 1 + place, torch.where(clean < 0, _ZERO - 1 - place, _ZERO))
        place = torch.where(finite, place, _NONFINITE)
        sums[:NUM_COUNTS] += torch.bincount(place, minlength=NUM_COUNTS)
        wide = clean.double()
        sums[-2] += wide.sum()
        sums[-1] += wide.square().sum()
        low, high = torch.where(finite, part, math.inf).min(), torch.where(finite, part, -math.inf).max()
        extrema = torch.stack([torch.minimum(extrema[0], low.double()), torch.maximum(extrema[1], high.double())])
    return sums, extrema


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The distribution of the values of one tensor, on the host."""

    counts: tuple[int, ...]
    """The values in each bucket, then those that are not finite."""
    total: float
    """Sum of the finite values."""
    squares: float
    """Sum of their squares."""
    low: float
    """The least finite value; infinite if there is none."""
    high: float

    @classmethod
    def of(cls, sums: Tensor, extrema: Tensor) -> Self:
        """Return the distribution that `measure` has counted, possibly added up over parts.

        Example:
            >>> Distribution.of(*measure(torch.tensor([0.0, 0.0, 3.0, 4.0]))).rms
            2.5
        """
        *counts, total, squares = sums.tolist()
        low, high = extrema.tolist()
        return cls(counts=tuple(map(int, counts)), total=total, squares=squares, low=low, high=high)

    @property
    def num_finite(self) -> int:
        """Number of finite values."""
        return sum(self.counts[:_NONFINITE])

    @property
    def num_nonfinite(self) -> int:
        """Number of values that are NaN or infinite."""
        return self.counts[_NONFINITE]

    @property
    def zero_share(self) -> float:
        """Share of zeros among the finite values."""
        return self.counts[_ZERO] / self.num_finite if self.num_finite else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values."""
        return math.sqrt(self.squares / self.num_finite) if self.num_finite else math.nan

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high)) if self.num_finite else math.nan

    def quantiles(self, shares: Sequence[float] = QUANTILES) -> list[float]:
        """Return quantiles of the magnitudes, to a quarter of an octave (9 % up or down); a zero is 0.

        Example:
            >>> Distribution.of(*measure(torch.tensor([0.0, 0.0, 1.0, 1.0]))).quantiles((0.5, 0.75))
            [0.0, 1.0905077326652577]
        """
        sides = zip(reversed(self.counts[:_ZERO]), self.counts[_ZERO + 1 : _NONFINITE], strict=True)
        magnitudes = [self.counts[_ZERO], *(below + above for below, above in sides)]
        found, place, seen = [], 0, magnitudes[0]
        for share in sorted(shares):
            while seen < share * self.num_finite and place < _SIDE:
                place += 1
                seen += magnitudes[place]
            found.append(0.0 if place == 0 else 2.0 ** (_LOW + (place - 0.5) / _PER_OCTAVE))
        return found

    def buckets(self) -> tuple[list[float], list[int]]:
        """Return the upper limits and the counts of the buckets from the first that is not empty to the last."""
        held = [place for place in range(_NONFINITE) if self.counts[place]]
        if not held:
            return [], []
        places = range(held[0], held[-1] + 1)
        limits = [_limit(place) for place in places]
        limits[-1] = max(min(limits[-1], self.high), self.low)
        return limits, [self.counts[place] for place in places]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of a line of `histograms.jsonl`; null where no value is finite."""
        values = {"rms": self.rms, "largest": self.largest, "zero_share": self.zero_share}
        return {
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "nonfinite": self.num_nonfinite,
            "quantiles": self.quantiles() if self.num_finite else None,
        }


def _limit(place: int) -> float:
    """Return the upper limit of a bucket."""
    if place == _ZERO:
        return 2.0**_LOW / 2
    if place > _ZERO:
        return float(2.0 ** (_LOW + (place - _ZERO) / _PER_OCTAVE))
    return float(-(2.0 ** (_LOW + (_ZERO - 1 - place) / _PER_OCTAVE)))
