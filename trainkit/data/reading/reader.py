"""Read samples of a map-style dataset, each with its own key for random numbers, here or in worker processes."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from multiprocessing.queues import Queue
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from trainkit.data.hooks import Reading
from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.errors import DataError
from trainkit.numerics.batch import Request
from trainkit.numerics.generators import seed_host
from trainkit.numerics.randomness import sample_key, shard_key

_T = TypeVar("_T")
_PR_SET_PDEATHSIG: Final = 1


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


def read_by_workers(reader: Reader, reading: Reading, requests: Iterable[Request]) -> Generator[Any]:
    """Yield the result of `Reader.read` for each request, on the host; the workers end with the generator.

    Raises:
        DataError: a sample cannot be read, or a batch cannot be sent.
        OSError, RuntimeError: no memory is left to send a batch, or a worker has ended.
    """
    settings = reading.settings
    ahead: Any = iter(
        DataLoader(
            _Remote(reader),
            batch_size=None,
            sampler=requests,
            num_workers=settings.num_processes,
            prefetch_factor=settings.prefetch,
            collate_fn=as_it_is,
            pin_memory=reading.device.type == "cuda" if settings.pin_memory == "auto" else settings.pin_memory,
            worker_init_fn=_enter_worker,
            # a separate generator: nothing may draw from the global one
            generator=torch.Generator(),
        )
    )
    workers = getattr(ahead, "_workers", ())
    try:
        for batch in ahead:
            if isinstance(batch, _Failure):
                raise batch.error
            yield batch
    except RuntimeError as error:
        ended = [f"pid {one.pid} {_ending(one.exitcode)}" for one in workers if one.exitcode is not None]
        if not ended:
            raise
        raise RuntimeError(
            f"a process that reads samples (loader.num_workers) has ended: {', '.join(ended)}"
        ) from error
    finally:
        # Waiting for garbage collection would leave processes running while anything refers to the iterator.
        ahead._shutdown_workers()  # noqa: SLF001
        for worker in workers:
            worker.kill()  # one that is stopped by a signal takes no SIGTERM, and Python would wait for it at its exit
            worker.join()


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the parent process."""

    error: Exception


class _Remote(Dataset[Any]):
    """The dataset and its reader in a worker process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._reader.read(*request)
        except DataError as error:
            return _Failure(error)


def _send_failure(queue: Queue[Any], error: Exception, item: Any) -> None:
    """Send an error in the place of a batch that cannot be sent.

    It is called in the thread of a queue that sends. By default it only prints the error, and the reader of the batch
    would wait for ever.
    """
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int)):  # a queue of the user's own
        traceback.print_exception(error)
        return
    if not isinstance(error, OSError | MemoryError) and "shared memory" not in str(error):
        advice = (
            "Change what the batch holds (a tensor that requires gradients: detach() it), or use loader.num_workers=0."
        )
        error = DataError(f"a worker process cannot send its batch: {type(error).__name__}: {error}. {advice}")
    queue.put((item[0], _Failure(error)))


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "by SIGKILL, as Linux ends processes if memory runs out: a lower loader.num_workers needs less"
    return f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"


def as_it_is(batch: _T) -> _T:
    """Return the batch itself."""
    return batch


def _enter_worker(_worker: int) -> None:
    """Set up a worker: leave Ctrl-C to its parent, end on SIGTERM, send every error, and do not outlive the parent."""
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # noqa: SLF001
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
