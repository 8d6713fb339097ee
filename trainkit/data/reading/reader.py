"""Read samples of a map-style dataset, each with its own key for random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.errors import DataError
from trainkit.numerics.generators import seed_host
from trainkit.numerics.randomness import sample_key, shard_key

_T = TypeVar("_T")


class Reader:
    """Reads samples; the random numbers in a sample depend on (seed, epoch, sample) alone.

    Seeding torch, `random` and NumPy for every sample costs 6 microseconds, more than many a `__getitem__`. So a batch
    is first read without seeding; if none of the three generators has advanced at its end, nothing in it was random and
    the batch is valid. Otherwise it is read again, sample by sample with their keys, as are all later batches.
    Generators that a dataset owns cannot be keyed: it must draw from one of these three. In the training process, call
    a reader inside of `Untouched`, which restores the generators of the training.

    Example:
        >>> class Noise:
        ...     def __getitem__(self, index):
        ...         return torch.rand(1)
        >>> once, again = Reader(Noise(), seed=0), Reader(Noise(), seed=0)
        >>> torch.equal(once.read(0, np.array([3, 5]), [2])[1], again.read(0, np.array([5]), [1])[0])
        True
    """

    def __init__(self, dataset: Any, *, seed: int, collate: CollateFunction | None = None) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._collate_draws = False
        self._many = getattr(dataset, "__getitems__", None)
        self.draws = False
        """Whether a sample has drawn random numbers."""

    def read(
        self, epoch: int, indices: NDArray[np.int64], sizes: Sequence[int], keys: Sequence[int] | None = None
    ) -> Any:
        """Read and collate the samples of several shards: one batch of all, or, with a collate, one batch per shard.

        The result of a collate may depend on all samples of its batch, so it is called with the samples of one shard,
        independent of the number of shards of this rank.

        Args:
            epoch: the epoch.
            indices: the samples of all shards, one shard after the other.
            sizes: the number of samples of each shard.
            keys: the key of the random numbers of each sample; None: its index.

        Raises:
            DataError: a sample cannot be read or collated; names its index.
        """
        places: list[int] = indices.tolist()
        keys = places if keys is None else keys
        if self._collate is None:
            return collate(self._samples(epoch, places, keys), places)
        ranges = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [self._collated(self._collate, epoch, places[part], keys[part]) for part in ranges]

    def _collated(self, function: CollateFunction, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Any:
        """Collate one shard; random numbers depend on (seed, epoch, first sample of the shard)."""
        if not (self.draws or self._collate_draws):
            batch, drew = watched(lambda: function(self._unkeyed(indices), indices))
            if not drew:
                return batch
        samples = self._samples(epoch, indices, keys)
        if not self._collate_draws:  # find out which of the two drew numbers
            batch, self._collate_draws = watched(lambda: function(samples, indices))
            if not self._collate_draws:
                return batch
            samples = self._samples(epoch, indices, keys)  # read again: a collate may change its samples
        seed_host(shard_key(self._seed, epoch, keys[0]))
        return function(samples, indices)

    def _samples(self, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Sequence[Any]:
        if not self.draws:
            samples, self.draws = watched(lambda: self._unkeyed(indices))
            if not self.draws:
                return samples
        keyed = []
        for index, key in zip(indices, keys, strict=True):
            seed_host(sample_key(self._seed, epoch, key))
            keyed += self._one_by_one([index])
        return keyed

    def _unkeyed(self, indices: Sequence[int]) -> Sequence[Any]:
        if self._many is None:
            return self._one_by_one(indices)
        try:
            found: Sequence[Any] = self._many(indices)
        except DataError:
            raise
        except Exception:  # noqa: BLE001 - reading one by one names the sample that fails
            return self._one_by_one(indices)
        if isinstance(found, Mapping) or len(found) != len(indices):
            raise DataError(
                f"__getitems__ of the dataset gives a {type(found).__name__} of {len(found)} for {len(indices)} "
                "indices. It must give a list with the sample of each index, as __getitem__ does."
            )
        return found

    def _one_by_one(self, indices: Sequence[int]) -> list[Any]:
        dataset, index, samples = self._dataset, -1, []
        try:
            for index in indices:
                samples.append(dataset[index])
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"sample {index} cannot be read: {type(error).__name__}: {error}") from error
        return samples


class RngWatch:
    """Detects whether any code has drawn from the three generators since `begin`.

    Two generators of its own are kept in the states of `random` and NumPy: if their next numbers are equal, no code has
    drawn. That costs 1 microsecond per batch, seeding them 5.5; torch's generator is cheap to seed and expensive to
    draw from.
    """

    def __init__(self) -> None:
        self._python = random.Random()  # noqa: S311 - not for secrets
        self._numpy = np.random.RandomState()
        self._torch = _next_of_torch(torch.Generator().manual_seed(0))

    def begin(self) -> None:
        """Synchronize the generators."""
        torch.default_generator.manual_seed(0)
        if random.random() != self._python.random():  # noqa: S311
            random.seed(0)
            self._python.seed(0)
        if np.random.random_sample() != self._numpy.random_sample():  # noqa: NPY002
            np.random.seed(0)  # noqa: NPY002
            self._numpy.seed(0)

    @property
    def broken(self) -> bool:
        """Whether a generator has advanced."""
        return (
            random.random() != self._python.random()  # noqa: S311
            or np.random.random_sample() != self._numpy.random_sample()  # noqa: NPY002
            or _next_of_torch(torch.default_generator) != self._torch
        )


def watched(read: Callable[[], _T]) -> tuple[_T, bool]:
    """Return the result of `read`, and whether it drew from a default generator."""
    watch = _watch()
    watch.begin()
    return read(), watch.broken


def _next_of_torch(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


@cache
def _watch() -> RngWatch:
    """Return the watch of this process."""
    return RngWatch()
