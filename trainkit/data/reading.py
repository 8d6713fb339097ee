"""Reading samples of a map-style dataset, each with its own key for whatever is random in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from trainkit.data.collate import collate
from trainkit.errors import DataError
from trainkit.numerics.randomness import sample_key

__all__ = ["Reader"]


class Reader:
    """Reads samples; what a sample draws depends on (seed, epoch, sample) alone.

    Seeding torch, `random` and NumPy for every sample costs 6 microseconds, more than many a `__getitem__`. So a
    batch is first read with three known generators, and when none of them has moved by its end, nothing in it was
    random and it stands. Otherwise it is read again, sample by sample with their keys, as is everything after.
    A generator that a dataset owns is beyond reach: it must draw from one of these three.

    Example:
        >>> class Noise:
        ...     def __getitem__(self, index):
        ...         return torch.rand(1)
        >>> once, again = Reader(Noise(), seed=0), Reader(Noise(), seed=0)
        >>> torch.equal(once.batch(0, [3, 5])[1], again.batch(0, [5])[0])
        True
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._many = getattr(dataset, "__getitems__", None)
        self.draws = False
        """Whether a sample has been seen to draw random numbers."""

    def batch(self, epoch: int, indices: Sequence[int]) -> Any:
        """Read and collate samples.

        Raises:
            DataError: a sample cannot be read or collated; its index is named.
        """
        return collate(self._samples(epoch, indices), indices)

    def _samples(self, epoch: int, indices: Sequence[int]) -> Sequence[Any]:
        if not self.draws:
            _set_generators(0)
            samples = self._unkeyed(indices)
            if _moved() == _UNMOVED:
                return samples
            self.draws = True
        return [self._keyed(epoch, index) for index in indices]

    def _unkeyed(self, indices: Sequence[int]) -> Sequence[Any]:
        if self._many is not None:
            with suppress(Exception):  # read one by one below, the one that fails can be named
                found: Sequence[Any] = self._many(indices)
                return found
        dataset, index = self._dataset, -1
        samples = []
        try:
            for index in indices:
                samples.append(dataset[index])
        except Exception as error:
            raise _unreadable(index, error) from error
        return samples

    def _keyed(self, epoch: int, index: int) -> Any:
        _set_generators(sample_key(self._seed, epoch, index))
        try:
            return self._dataset[index]
        except Exception as error:
            raise _unreadable(index, error) from error


def _unreadable(index: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"sample {index} cannot be read: {type(error).__name__}: {error}")


def _set_generators(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002 - the generator that a dataset's own code may use


def _moved() -> tuple[int, float, float]:
    """What the three generators say next."""
    torch_says = torch.empty((), dtype=torch.int64).random_().item()
    return int(torch_says), random.random(), np.random.random_sample()  # noqa: NPY002, S311 - not for secrets


def _unmoved() -> tuple[int, float, float]:
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    _set_generators(0)
    says = _moved()
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002 - see above
    return says


_UNMOVED = _unmoved()
