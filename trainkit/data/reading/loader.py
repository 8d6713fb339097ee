"""Batches of a split: those of its tickets for the training loop, and each sample once for an evaluation."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, islice
from math import gcd
from multiprocessing.queues import Queue
from time import perf_counter
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from trainkit.data.hooks import Reading
from trainkit.data.reading.collate import (
    BatchesAsRead,
    CollateFunction,
    collate,
    mover_to,
    narrow,
    parts_of,
    refuse_other_rows,
    shards_of,
    tensors_in,
    to_device,
    with_parts,
)
from trainkit.data.reading.iterable import Stream, StreamReader
from trainkit.data.splits import size_of
from trainkit.data.stored import refuse_other_samples, stored_of
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Positions, Request, Ticket
from trainkit.numerics.copies import sent_to
from trainkit.numerics.generators import Untouched, seed_host
from trainkit.numerics.randomness import sample_key, shard_key

_T = TypeVar("_T")


class Reader(Dataset[Any]):
    """Reads samples; the random numbers in a sample depend on (seed, epoch, sample) alone.

    Seeding torch, `random` and NumPy for every sample costs 6 microseconds, more than many a `__getitem__`. So a batch
    is first read without seeding; if none of the three generators has advanced at its end, nothing in it was random and
    the batch is valid. Otherwise it is read again, sample by sample with their keys, as are all later batches. With
    `is_watched` the caller compares the generators once for several batches without a collate, which is seeded.
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

    def __init__(
        self, dataset: Any, *, seed: int, collate: CollateFunction | None = None, is_watched: bool = False
    ) -> None:
        self._dataset, self._seed, self._collate, self.is_watched = dataset, seed, collate, is_watched
        self._getitems = getattr(dataset, "__getitems__", None)
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
        index_list: list[int] = indices.tolist()
        keys = index_list if keys is None else keys
        if self._collate is None:
            return collate(self._samples(epoch, index_list, keys), index_list)
        ranges = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [self._collated(self._collate, epoch, index_list[part], keys[part]) for part in ranges]

    def __getitem__(self, request: Request) -> Any:
        """Return the batch of a request, or the error that names a sample."""
        try:
            return self.read(*request)
        except DataError as error:
            return error

    def _collated(self, function: CollateFunction, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Any:
        """Collate one shard; random numbers depend on (seed, epoch, first sample of the shard)."""
        samples = self._samples(epoch, indices, keys)
        seed_host(shard_key(self._seed, epoch, keys[0]))
        return function(samples, indices)

    def _samples(self, epoch: int, indices: Sequence[int], keys: Sequence[int]) -> Sequence[Any]:
        if not self.draws:
            if self.is_watched:
                return self._unkeyed(indices)
            samples, self.draws = watched(lambda: self._unkeyed(indices))
            if not self.draws:
                return samples
        keyed = []
        for index, key in zip(indices, keys, strict=True):
            seed_host(sample_key(self._seed, epoch, key))
            keyed += self._one_by_one([index])
        return keyed

    def _unkeyed(self, indices: Sequence[int]) -> Sequence[Any]:
        if self._getitems is None:
            return self._one_by_one(indices)
        try:
            samples: Sequence[Any] = self._getitems(indices)
        except DataError:
            raise
        except Exception:  # noqa: BLE001 - reading one by one names the sample that fails
            return self._one_by_one(indices)
        if isinstance(samples, Mapping) or len(samples) != len(indices):
            raise DataError(
                f"__getitems__ of the dataset gives a {type(samples).__name__} of {len(samples)} for {len(indices)} "
                "indices. It must give a list with the sample of each index, as __getitem__ does."
            )
        return samples

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


def watched(read: Callable[[], _T]) -> tuple[_T, bool]:
    """Return the result of `read`, and whether it drew from one of the three default generators, which it seeds."""
    seed_host(0)
    result = read()
    return result, _drawn() != _first_drawn()


def _drawn() -> tuple[float, float, int]:
    """Return the next number of each generator."""
    of_torch = int(torch.empty((), dtype=torch.int64).random_().item())
    return random.random(), np.random.random_sample(), of_torch  # noqa: NPY002, S311 - those that a user's code may use


@cache
def _first_drawn() -> tuple[float, float, int]:
    seed_host(0)
    return _drawn()


def read_by_workers(reader: Reader, reading: Reading, requests: Iterable[Request]) -> Generator[Any]:
    """Yield the result of `Reader.read` for each request, on the host; the workers end with the generator.

    Raises:
        DataError: a sample cannot be read, or a batch cannot be sent.
        OSError, RuntimeError: no memory is left to send a batch, or a worker has ended.
    """
    settings = reading.settings
    ahead: Any = iter(
        DataLoader(
            reader,
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
            if isinstance(batch, Exception):
                raise batch
            yield batch
    except RuntimeError as error:
        ended = [f"pid {worker.pid} {_ending(worker.exitcode)}" for worker in workers if worker.exitcode is not None]
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
    queue.put((item[0], error))


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
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_CHUNK: Final = 1024
"""Number of samples collated at a time when a dataset is read into memory."""
_BURST: Final = 16
"""Most requests that are gathered at a time."""
_BURST_BYTES: Final = 1 << 20
"""Most bytes of their batches together: they stay in the second-level cache of a processor."""
_READ_BYTES: Final = 1 << 18
"""The same limit for batches that are read sample by sample, which no plan counts."""
_BURST_S: Final = 1e-2
"""Longest time that a step waits for batches of later steps."""
_TAKES_STORED: Final = frozenset({"cpu", "cuda", "meta"})
"""Kinds of devices on which every dtype of stored samples is converted; for others, the host converts them."""
_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

Arrays = tuple[Tensor, ...] | dict[str, Tensor]
"""A whole dataset in memory: the first dim of every tensor is the sample."""


class Source:
    """Reads the batches of a split in the fastest way that its dataset allows.

    - a dataset in memory (`tensors()`, or `loader.cache=true`), or with `gather(indices)`, if no collate is set: by one
      indexed read, on the device if a dataset in memory fits there;
    - any other map-style dataset: sample by sample, in `loader.num_workers` processes or in this one;
    - a `Stream`: by position, in its own order.

    The samples of a request, and the random numbers in them, are the same in all of these ways.

    Args:
        dataset: the split.
        reading: how it is read.
        trains: whether it is the training split: its stored form is checked, and it may be kept on the device.
        stream: the reader of a `Stream`; None for any other dataset.

    Raises:
        ConfigError: a setting is not possible with this dataset or device.
        DataError: the dataset gives other samples than it should.
    """

    def __init__(self, dataset: Any, reading: Reading, *, trains: bool, stream: StreamReader | None = None) -> None:
        hooks, settings, device = reading.hooks, reading.settings, reading.device
        self._has_shards = stream is not None or hooks.collate is not None
        # A collate is called with the samples of the class.
        stored = None if self._has_shards else stored_of(dataset)
        if stored is not None and trains:
            refuse_other_samples(dataset, stored)
        read, widened = (dataset, None) if stored is None else (stored.samples, stored.widened)
        # A tensor has a method `gather` that does something else.
        reads_many = not self._has_shards and settings.cache is not False and not isinstance(read, Tensor)
        gather = getattr(read, "gather", None) if reads_many else None
        arrays: Arrays | None = None
        if reads_many and gather is None and callable(offer := getattr(read, "tensors", None)):
            with Untouched(seed=0):
                arrays = offer()
            refuse_other_rows(arrays, len(read), f"{type(read).__name__}.tensors()")
        elif reads_many and gather is None and settings.cache is True:
            arrays = collated(read, name=type(dataset).__name__)
        home, moves = torch.device("cpu"), True
        if arrays is not None:
            if trains:
                arrays, home, widened = _placed(arrays, widened, device)
                moves = home != device
            if not moves and settings.pin_memory is True:
                rule = "has no effect: the dataset is on the device, and no batch is copied to it. Use auto."
                raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
            gather = partial(_rows, arrays)
        elif gather is not None:
            gather = _checked(gather)
        self._move = mover_to(device, pins=settings.pin_memory is not False) if moves else as_it_is
        self._widened = as_it_is if widened is None else widened
        self._widens_first = moves and device.type not in _TAKES_STORED
        make_reader = partial(Reader, read, seed=reading.seed, collate=hooks.collate)
        by_workers = gather is None and stream is None and settings.num_processes > 0
        one_by_one = make_reader(is_watched=hooks.collate is None)
        self._in_process: Callable[[Iterator[Request]], Generator[Any]] = partial(_in_bursts, one_by_one)
        if stream is not None:
            self._in_process = stream.ahead
        elif gather is not None:
            self._in_process = partial(_gathered, gather, home)
        self.ahead = partial(read_by_workers, make_reader(), reading) if by_workers else self._in_process
        """Function that yields the batch of each request, read ahead; worker processes end with its generator."""
        self.calls_own_code = not by_workers and arrays is None
        """Whether reading calls code of the dataset, or of the user, in this process."""

    def read(self, request: Request) -> Any:
        """Return the batch of a request, read in this process.

        Raises:
            DataError: a sample cannot be read or collated; names its index.
        """
        return next(self._in_process(iter([request])))

    def arrive(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Return the batch of each shard on the device; shards that were read together are views of one batch."""
        batch = self._move(self._widened(batch)) if self._widens_first else self._widened(self._move(batch))
        if self._has_shards:
            return list(batch)
        return [batch] if len(sizes) == 1 else shards_of(batch, sizes)


def _in_bursts(reader: Reader, requests: Iterator[Request]) -> Generator[Any]:
    """Read sample by sample, several requests at a time if they are small and fast to read.

    Reading and stepping evict each other's data from the processor's caches: with a batch read before each step of a
    small model, both took about a sixth longer than separately. Reading a burst of batches every few steps pays this
    cost once per burst. An error is raised at the request that caused it.
    """
    for first in requests:
        started, burst, batches, most = perf_counter(), list[Request](), list[Any](), 1
        with Untouched(seed=0):
            for request in chain([first], requests):
                burst.append(request)
                batches.append(reader[request])
                if len(batches) == 1:
                    leaves = [leaf for leaf in tree_leaves(batches[0]) if isinstance(leaf, Tensor)]
                    num_bytes = sum(leaf.numel() * leaf.itemsize for leaf in leaves)  # `nbytes` fails for sparse ones
                    most = _READ_BYTES // (num_bytes + 1)
                failed = isinstance(batches[-1], DataError)
                if failed or len(batches) >= most or perf_counter() - started > _BURST_S:
                    break
            if reader.is_watched and not reader.draws and _drawn() != _first_drawn():
                reader.draws = True
                batches = [reader[request] for request in burst]
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch


def _gathered(gather: Callable[[Tensor], Any], home: torch.device, requests: Iterator[Request]) -> Generator[Any]:
    """Read by indices on a device; small batches are gathered several at a time, a quarter of the time for each."""
    row_bytes, multiple = 0, 1  # of a sample; samples between two places where torch would place a tensor
    while chosen := list(islice(requests, _BURST)):
        counts = [len(indices) for _, indices, _, _ in chosen]
        index = sent_to(home, torch.from_numpy(np.concatenate([indices for _, indices, _, _ in chosen])))
        if row_bytes and len(index) * row_bytes <= _BURST_BYTES:
            starts = [0, *accumulate(counts)]
            for start, batch in zip(starts, shards_of(gather(index), counts), strict=False):
                yield to_device(batch, home, torch.clone) if start % multiple else batch
            continue
        for part in torch.split(index, counts):
            batch = gather(part)
            if not row_bytes and (rows := [tensor[:1].nbytes for tensor in tensors_in(batch)]):
                # Kernels may round differently at other places.
                alignment = 64 if home.type == "cpu" else 512
                row_bytes, multiple = sum(rows), max(alignment // gcd(row, alignment) for row in rows)
            yield batch


def _checked(gather: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return the method `gather` of a dataset, whose first result is checked."""
    is_known = False

    def checked(index: Tensor) -> Any:
        nonlocal is_known
        if is_known:
            return gather(index)
        with Untouched(seed=0):
            rows, drew = watched(lambda: gather(index))
        if drew:
            raise DataError(
                "the dataset draws random numbers in gather, and random numbers of data are keyed by sample. "
                "Use loader.cache=false, which reads samples one at a time."
            )
        refuse_other_rows(rows, len(index), "gather(indices)")
        is_known = True
        return rows

    return checked


def _rows(arrays: Arrays, index: Tensor) -> Any:
    """Return rows of arrays. Torch gathers few unsigned types: they are gathered as signed ones of the same bits."""
    return with_parts(
        arrays, lambda array: array.view(_SIGNED.get(array.dtype, array.dtype)).index_select(0, index).view(array.dtype)
    )


def _placed(
    arrays: Any, widened: Callable[[Any], Any] | None, device: torch.device
) -> tuple[Any, torch.device, Callable[[Any], Any] | None]:
    """Put arrays on the device if they fit there: as the class documents them, else as they are stored.

    Returns:
        The arrays, their device, and the conversion that their rows still need.
    """
    if widened is not None:
        row, count = widened(narrow(arrays, 0, 1)), len(next(tensors_in(arrays)))
        if _fits(device, sum(tensor.nbytes for tensor in tensors_in(row)) * count):
            return widened(to_device(arrays, device)), device, None
    if _fits(device, sum(tensor.nbytes for tensor in tensors_in(arrays))):
        return to_device(arrays, device), device, widened
    return arrays, torch.device("cpu"), widened


def collated(dataset: Any, *, name: str | None = None) -> Arrays:
    """Read a map-style dataset into memory, once.

    Args:
        dataset: the samples.
        name: its name in error messages; None: the name of its class.

    Raises:
        ConfigError: its samples are random: with a cache, every epoch would repeat those of the first.
        DataError: a sample is not a tuple or dict of tensors, or cannot be read.
    """
    reader = Reader(dataset, seed=0)
    count, name = len(dataset), name or type(dataset).__name__
    with Untouched(seed=0):
        chunks = [reader.read(0, np.arange(start, min(start + _CHUNK, count)), []) for start in range(0, count, _CHUNK)]
    if reader.draws:
        rule = (
            f"the samples of {name} are random, and a cache would repeat those of the first "
            "epoch. Use loader.cache=false."
        )
        raise ConfigError([Problem(key="loader.cache", value=True, rule=rule)])
    first = chunks[0]
    if not isinstance(first, dict | tuple) or not all(isinstance(part, Tensor) for part in parts_of(first) or ()):
        raise DataError(
            f"a sample of {name} is not a tuple or dict of tensors and numbers: loader.cache=true cannot keep it."
        )
    arrays: Arrays = tree_map(lambda *parts: torch.cat(parts), *chunks)
    return arrays


def _fits(device: torch.device, num_bytes: int) -> bool:
    """Return whether `num_bytes` are less than a quarter of the device's free memory."""
    if device.type != "cuda":
        return device.type == "cpu"
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes < free // 4


class Loader:
    """Batches by ticket, read ahead as the `Source` of the dataset does it.

    The batches of this rank's planned tickets are read ahead, from any step on, so that resuming costs nothing. A
    ticket of another step begins the reading there; one with other shards than planned, or that of the last step once
    more, is read alone, and the reading ahead continues.

    Args:
        dataset: the training split.
        plan: how its samples form steps and shards.
        shards_at: returns the shards of this rank at a step; used for reading ahead.
        num_steps: steps of the run; nothing is read past them.
        reading: how they are read.

    Raises:
        ConfigError: a setting is not possible with this dataset or device.
        DataError: the dataset is empty or has no length.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        plan: BatchPlan,
        shards_at: Callable[[int], Sequence[int]],
        num_steps: int,
        reading: Reading,
    ) -> None:
        hooks, settings, device = reading.hooks, reading.settings, reading.device
        if size_of(dataset) == 0:
            raise DataError(f"{type(dataset).__name__} is empty: it has no samples to train on.")
        if settings.pin_memory is True and device.type != "cuda":
            rule = f"pinned memory is for copies to a CUDA device, and this run is on {device.type}. Use auto."
            raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
        hooks.refuse_misfits(dataset, settings)
        self._stream: StreamReader | None = None
        if isinstance(dataset, Stream):
            self._stream = StreamReader(dataset, seed=reading.seed, collate=hooks.collate_function, plan=plan)
        self._source = Source(dataset, reading, trains=True, stream=self._stream)
        self._positions = Positions(plan, hooks.order(dataset, plan, seed=reading.seed, shuffle=settings.shuffle))
        self._shards_at, self._num_steps, self._reading = shards_at, num_steps, reading
        self._ahead: Generator[Any] | None = None
        self._pending: deque[tuple[Ticket, list[int]]] = deque()
        """Tickets whose batches are being read ahead, with the sizes of their shards."""
        self._next: Any = None
        """The batch of the first of them, once it was taken."""
        self._last: tuple[Ticket, BatchesAsRead] | None = None
        self._are_changed = False
        self.calls_own_code = hooks.transform is not None or self._source.calls_own_code
        """Whether `fetch` calls code of the dataset, or of the user, in this process."""
        self.wait_s = 0.0
        """Seconds that the training loop has spent in `fetch`."""

    def fetch(self, ticket: Ticket) -> Sequence[Any]:
        """Return the batches of a ticket's shards, one per shard; empty for a ticket without shards.

        For a repeated ticket (a retry after an overflow), it returns the same batches, as they were read.

        Raises:
            DataError: a sample cannot be read or collated; names its index.
        """
        if not ticket.shards:
            return []
        if self._last is not None:
            if self._last[0] == ticket:
                return self._last[1]
            self._are_changed = self._are_changed or self._last[1].were_changed
        started = perf_counter()
        # Batches of the first ticket are kept for the passes that follow: a stream is slow to read again.
        keeps = self._last is None or self._are_changed
        batches = BatchesAsRead(self._read(ticket), read_again=partial(self._read, ticket), keeps=keeps)
        self._last = ticket, batches
        self.wait_s += perf_counter() - started
        return batches

    def _read(self, ticket: Ticket) -> list[Any]:
        sizes, batch = self._host_batch(ticket)
        batches = self._source.arrive(batch, sizes)
        if (transform := self._reading.hooks.transform) is None:
            return batches
        # keyed by (seed, step, shard): the same on any rank, and after a resume
        return [
            transform(batch, key=(self._reading.seed, ticket.step, shard), size=size, device=self._reading.device)
            for shard, batch, size in zip(ticket.shards, batches, sizes, strict=True)
        ]

    def _host_batch(self, ticket: Ticket) -> tuple[list[int], Any]:
        """Return the sizes of the shards, and their batch as it was read."""
        is_again = self._last is not None and self._last[0].step == ticket.step
        if self._stream is None and not is_again:  # what is read ahead would move the state of a stream
            is_next = self._has_next() and self._pending[0][0] == ticket
            if not is_next and ticket.shards == tuple(self._shards_at(ticket.step)):
                self._stop()
                self._ahead = self._source.ahead(self._requests(ticket.step))
                is_next = self._has_next()
            if is_next:
                batch, self._next = self._next, None
                return self._pending.popleft()[1], batch
        request = self._positions.request(ticket)
        return request[2], self._source.read(request)

    def _has_next(self) -> bool:
        """Take the batch of the first pending ticket, unless it was taken already; return whether there is one."""
        if self._next is None and self._ahead is not None:
            self._next = next(self._ahead, None)
        return self._next is not None

    def _requests(self, step: int) -> Iterator[Request]:
        # Use separate positions: workers run ahead of the training, which must keep its cached block of positions.
        positions = Positions(self._positions.plan, self._positions.order)
        for later in range(step, self._num_steps):
            ticket = Ticket(later, tuple(self._shards_at(later)))
            if ticket.shards:
                request = positions.request(ticket)
                self._pending.append((ticket, request[2]))
                yield request

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint with which a stream resumes without reading again; None if not needed."""
        step = 0 if self._last is None else self._last[0].step + 1
        return None if self._stream is None else self._stream.state(step)

    def load_state(self, state: dict[str, Any] | None) -> str | None:
        """Restore `state` before the first fetch of a resumed run.

        Returns:
            A line for the user about how a stream finds its position; None for datasets with random access.
        """
        return None if self._stream is None else self._stream.load_state(state)

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._stop()
        self._last = None

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._next = None
        self._pending.clear()


def num_eval_batches(num_samples: int, batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> int:
    """Return how many batches one rank gets: every `num_ranks`-th of them.

    Example:
        >>> [num_eval_batches(10, 4, rank=rank, num_ranks=2) for rank in (0, 1)]
        [2, 1]
    """
    return len(range(rank, -(-num_samples // batch_size), num_ranks))


class EvalBatches:
    """A split in its own order, in batches; rank r evaluates batch r, r + num_ranks, ...

    A batch holds the same samples on any number of ranks, and the last one may be short: nothing is padded, so no
    sample counts twice. It can be iterated repeatedly; random numbers in a sample are keyed as in epoch 0 with seed 0,
    the same at each evaluation.

    If ranks run the model together, every rank iterates equally many batches: a rank with one batch less repeats a
    batch of the split, which must not be counted (`num_counted`).

    `starts` gives the first samples of this rank's batches instead, in any order.

    Example:
        >>> import torch
        >>> from trainkit.data.sets.images import Digits
        >>> from trainkit.config.sections import LoaderConfig
        >>> reading = Reading(device=torch.device("cpu"), settings=LoaderConfig())
        >>> batches = EvalBatches(Digits(split="val"), reading, batch_size=100, rank=0, num_ranks=1)
        >>> [len(labels) for _, labels in batches]
        [100, 100, 100, 60]
    """

    def __init__(
        self,
        dataset: Any,
        reading: Reading,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        together: bool = False,
        starts: Sequence[int] | None = None,
    ) -> None:
        stream = None
        if isinstance(dataset, Stream):
            stream = StreamReader(dataset, seed=0, collate=reading.hooks.collate_function)
        self._source = Source(dataset, replace(reading, seed=0), trains=False, stream=stream)
        count, has_starts = size_of(dataset), starts is not None
        starts = list(range(rank * batch_size, count, num_ranks * batch_size) if starts is None else starts)
        self.num_counted = len(starts)
        """Number of this rank's own batches, which come first."""
        if together and not has_starts and len(starts) < num_eval_batches(count, batch_size, num_ranks=num_ranks):
            starts.append(starts[-1] if starts else 0)
        ranges = [np.arange(start, min(start + batch_size, count)) for start in starts]
        self._requests: list[Request] = [(0, indices, [len(indices)], None) for indices in ranges]

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rank's batches once, on the device.

        Raises:
            DataError: a sample cannot be read or collated; its index is named.
        """
        if self._requests:
            with closing(self._source.ahead(iter(self._requests))) as ahead:
                for (_, _, sizes, _), batch in zip(self._requests, ahead, strict=True):
                    yield self._source.arrive(batch, sizes)[0]
