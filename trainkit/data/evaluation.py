"""Batches for evaluation: each sample exactly once, over all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from trainkit.data.hooks import Reading
from trainkit.data.reading.collate import narrow, to_device
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import Arrays, collated, whole_arrays
from trainkit.data.reading.reader import Reader
from trainkit.data.reading.workers import read_ahead, results, shut_down
from trainkit.data.splits import size_of
from trainkit.data.stored import batch_mover, stored_of, widening
from trainkit.numerics.batch import Request
from trainkit.numerics.generators import Untouched
from trainkit.numerics.randomness import sample_key, shard_key


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
        >>> from trainkit.data.sets.digits import Digits
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
        hooks, settings, device = reading.hooks, reading.settings, reading.device
        stream, named = isinstance(dataset, Stream), type(dataset).__name__
        stored = None if stream or hooks.collate is not None else stored_of(dataset)
        dataset = dataset if stored is None else stored.samples
        self._dataset, self._reading = dataset, replace(reading, seed=0)
        self._move = widening(batch_mover(device, settings), stored, device)
        count = size_of(dataset)
        given = starts is not None
        starts = list(range(rank * batch_size, count, num_ranks * batch_size) if starts is None else starts)
        self.num_counted = len(starts)
        """Number of this rank's own batches, which come first."""
        if together and not given and len(starts) < num_eval_batches(count, batch_size, num_ranks=num_ranks):
            starts.append(starts[-1] if starts else 0)
        self._ranges = [(start, min(start + batch_size, count)) for start in starts]
        by_sample = settings.cache is False or hooks.collate is not None
        self._arrays = None if stream or by_sample else whole_arrays(dataset)
        # The method of a tensor by this name is another.
        self._gather = None if by_sample or isinstance(dataset, torch.Tensor) else getattr(dataset, "gather", None)
        if self._arrays is None and self._gather is None and settings.cache is True and not stream:
            self._arrays = collated(dataset, name=named)

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self._ranges)

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rank's batches once, on the device.

        Raises:
            DataError: a sample cannot be read or collated; its index is named.
        """
        if self._arrays is not None:
            host: Iterator[Any] = (self._part(self._arrays, start, stop) for start, stop in self._ranges)
        elif self._gather is not None:
            host = (_gathered(self._gather, start, stop) for start, stop in self._ranges)
        elif isinstance(self._dataset, Stream):
            host = self._streamed(self._dataset)
        elif self._reading.settings.num_processes and self._ranges:
            host = self._by_workers()
        else:
            reader = Reader(self._dataset, seed=0, collate=self._reading.hooks.collate)
            host = (_read(reader, start, stop) for start, stop in self._ranges)
        for batch in host:
            yield self._move(batch)

    def _part(self, arrays: Arrays, start: int, stop: int) -> Any:
        """Return samples of the arrays, as a copy on the CPU: a model may write into its inputs."""
        part, device = narrow(arrays, start, stop - start), self._reading.device
        return to_device(part, device, torch.clone) if device.type == "cpu" else part

    def _streamed(self, stream: Stream) -> Iterator[Any]:
        items, position = stream.from_begin(0), 0
        for start, stop in self._ranges:
            if start < position:  # a repeated batch
                items, position = stream.from_begin(0), 0
            with Untouched(seed=0):
                deque(islice(items, start - position), maxlen=0)  # batches of other ranks
            with Untouched(seed=sample_key(0, 0, start)):
                samples = list(islice(items, stop - start))
            if len(samples) < stop - start:
                raise stream.too_short(start + len(samples))
            with Untouched(seed=shard_key(0, 0, start)):
                batch = self._reading.hooks.collate_function(samples, range(start, stop))
            yield batch
            position = stop

    def _by_workers(self) -> Iterator[Any]:
        requests: list[Request] = [(0, list(range(*ends)), [ends[1] - ends[0]], None) for ends in self._ranges]
        ahead = read_ahead(self._dataset, requests, self._reading)
        try:
            for found in results(ahead):
                yield found if self._reading.hooks.collate is None else found[0]
        finally:
            shut_down(ahead)


def _read(reader: Reader, start: int, stop: int) -> Any:
    with Untouched(seed=0):
        return reader.cut(reader.read(0, range(start, stop), [stop - start]), [stop - start])[0]


def _gathered(gather: Callable[[torch.Tensor], Any], start: int, stop: int) -> Any:
    with Untouched(seed=sample_key(0, 0, start)):
        return gather(torch.arange(start, stop))
