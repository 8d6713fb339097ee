"""The order of the samples: a permutation keyed by (seed, epoch), in memory that does not grow with the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainkit.numerics.hashing import hash64, mix64_array

_ROUNDS: Final = 6
_DRAWING: Final = 0x64726177
"""Separates draws by weight from the permutation of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The permutation of an epoch: which sample is at which position.

    A Feistel network over the smallest power of two that holds the dataset, applied until the value is in range (cycle
    walking, Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Any range of the order is computed alone:
    resuming in the middle of an epoch of 1e9 samples costs as much as its next batch.

    Example:
        >>> order = SampleOrder(num_samples=5, seed=0)
        >>> sorted(order.indices(0, 0, 5).tolist())
        [0, 1, 2, 3, 4]
    """

    num_samples: int
    """Samples in the dataset."""
    seed: int
    """The run's seed."""
    shuffle: bool = True
    """False: every epoch uses the dataset's own order."""

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch.

        Args:
            epoch: from 0.
            start: first position, from 0.
            stop: one past the last position, at most `num_samples`.

        Returns:
            (stop - start,) int64, indices into the dataset.
        """
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        bits = (self.num_samples - 1).bit_length()
        rounds = [_Round(hash64(self.seed, epoch, number), bits, number) for number in range(_ROUNDS)]
        if 1 << (bits - bits // 2) <= stop - start:
            rounds = [each.tabulated() for each in rounds]
        values = _encrypt(np.arange(start, stop, dtype=np.int64), rounds, bits)
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            moved = _encrypt(values[outside], rounds, bits)
            values[outside] = moved
            outside = outside[moved >= self.num_samples]
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedOrder:
    """Draw the sample at each position of an epoch by weight, with replacement.

    What is drawn at a position depends on (seed, epoch, position) alone, so that any range is computed alone.

    Example:
        >>> order = WeightedOrder(cumulative=np.cumsum([0.0, 1.0, 3.0]), seed=0)
        >>> np.bincount(order.indices(0, 0, 4000)).tolist()
        [0, 1028, 2972]
    """

    cumulative: NDArray[np.float64]
    """(samples,) sums of the weights up to each sample; the last is above 0."""
    seed: int
    """The run's seed."""

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch, (stop - start,) int64."""
        places = np.arange(start, stop, dtype=np.uint64)
        bits = mix64_array(np.uint64(hash64(self.seed, epoch, _DRAWING)) ^ places)
        share = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        drawn = np.searchsorted(self.cumulative, share * self.cumulative[-1], side="right")
        # A product that rounds up to the whole sum must not lead past the last sample with a weight.
        last = np.searchsorted(self.cumulative, self.cumulative[-1], side="left")
        found: NDArray[np.int64] = np.minimum(drawn, last).astype(np.int64)
        return found


class _Round:
    """The round function of the half that it reads. The two halves swap widths every round."""

    def __init__(self, key: int, bits: int, number: int) -> None:
        high, low = bits // 2, bits - bits // 2
        self._read, changed = (low, high) if number % 2 == 0 else (high, low)
        self._key, self._mask = np.uint64(key), np.uint64((1 << changed) - 1)
        self._table: NDArray[np.int64] | None = None

    def __call__(self, part: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._table is not None:
            return self._table[part]
        return (mix64_array(self._key ^ part.astype(np.uint64)) & self._mask).astype(np.int64)

    def tabulated(self) -> _Round:
        """Use a table, which takes a third of the time if more positions are needed than the half has values."""
        self._table = self(np.arange(1 << self._read, dtype=np.int64))
        return self


def _encrypt(values: NDArray[np.int64], rounds: list[_Round], bits: int) -> NDArray[np.int64]:
    """Permute [0, 2**bits). After an even number of rounds the halves have their own widths again."""
    low = bits - bits // 2
    left, right = values >> low, values & ((1 << low) - 1)
    for each in rounds:
        left, right = right, left ^ each(right)
    return (left << low) | right
