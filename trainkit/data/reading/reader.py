"""Read samples of a map-style dataset, each with its own key for random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from trainkit.data.reading.collate import CollateFunction, collate, shards_of
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
        >>> torch.equal(once.batch(0, [3, 5])[1], again.batch(0, [5])[0])
        True
    """

    def __init__(self, dataset: Any, *, seed: int, collate: CollateFunction | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        self._collate_draws = False
        self._many = getattr(dataset, "__getitems__", None)
        self.draws = False
        """Whether a sample has drawn random numbers."""

    def batch(self, epoch: int, indices: Sequence[int]) -> Any:
        """Read and collate samples.

        Raises:
            DataError: a sample cannot be read or collated; names its index.
        """
        return collate(self._samples(epoch, indices, indices), indices)

    def read(self, epoch: int, indices: Sequence[int], sizes: Sequence[int], keys: Sequence[int] | None = None) -> Any:
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
        keys = indices if keys is None else keys
        if self._collate is None:
            return collate(self._samples(epoch, indices, keys), indices)
        ends = list(accumulate(sizes))
        return [
            self._collated(self._collate, epoch, indices[end - size : end], keys[end - size : end])
            for size, end in zip(sizes, ends, strict=True)
        ]

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Split the result of `read` into one batch per shard of the given sizes."""
        if self._collate is not None:
            return list(batch)
        return [batch] if len(sizes) == 1 else shards_of(batch, sizes)

    def _collated(self, function: CollateFunction, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Any:
        """Collate one shard; random numbers depend on (seed, epoch, first sample of the shard)."""
        if not (self.draws or self._collate_draws):
            _watch().begin()
            batch = function(self._unkeyed(indices), indices)
            if not _watch().broken:
                return batch
        if not self._collate_draws:  # find out which of the two drew numbers
            samples = self._samples(epoch, indices, keys)
            _watch().begin()
            batch = function(samples, indices)
            if not _watch().broken:
                return batch
            self._collate_draws = True
        samples = self._samples(epoch, indices, keys)  # read again: a collate may change its samples
        seed_host(shard_key(self._seed, epoch, keys[0]))
        return function(samples, indices)

    def _samples(self, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Sequence[Any]:
        if not self.draws:
            _watch().begin()
            samples = self._unkeyed(indices)
            if not _watch().broken:
                return samples
            self.draws = True
        return [self._keyed(epoch, index, key) for index, key in zip(indices, keys, strict=True)]

    def _unkeyed(self, indices: Sequence[int]) -> Sequence[Any]:
        if self._many is not None:
            try:
                return _one_for_each(indices, self._many(indices))
            except DataError:
                raise
            except Exception:  # noqa: BLE001, S110 - reading one by one below names the sample that fails
                pass
        dataset, index = self._dataset, -1
        samples = []
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            raise _unreadable(index, error) from error
        return samples

    def _keyed(self, epoch: int, index: int, key: int) -> Any:
        seed_host(sample_key(self._seed, epoch, key))
        try:
            return self._dataset[index]
        except Exception as error:
            raise _unreadable(index, error) from error


def _one_for_each(indices: Sequence[int], found: Any) -> Sequence[Any]:
    """Return the samples that `__getitems__` gave.

    Raises:
        DataError: it gave another number of samples, or columns.
    """
    if isinstance(found, Mapping) or len(found) != len(indices):
        raise DataError(
            f"__getitems__ of the dataset gives a {type(found).__name__} of {len(found)} for {len(indices)} indices. "
            "It must give a list with the sample of each index, as __getitem__ does."
        )
    samples: Sequence[Any] = found
    return samples


def _unreadable(index: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"sample {index} cannot be read: {type(error).__name__}: {error}")


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


def result_without_draws(read: Callable[[], _T]) -> _T | None:
    """Return the result of `read`; None if it draws from a default generator."""
    _watch().begin()
    found = read()
    return None if _watch().broken else found


def _next_of_torch(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


@cache
def _watch() -> RngWatch:
    """Return the watch of this process."""
    return RngWatch()
