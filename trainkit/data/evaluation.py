"""Batches for evaluation: each sample exactly once, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from trainkit.data.hooks import Reading
from trainkit.data.reading.iterable import Stream, StreamReader
from trainkit.data.reading.source import Source
from trainkit.data.splits import size_of
from trainkit.numerics.batch import Request


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
        stream = None
        if isinstance(dataset, Stream):
            stream = StreamReader(dataset, seed=0, collate=reading.hooks.collate_function)
        self._source = Source(dataset, replace(reading, seed=0), trains=False, stream=stream)
        count, given = size_of(dataset), starts is not None
        starts = list(range(rank * batch_size, count, num_ranks * batch_size) if starts is None else starts)
        self.num_counted = len(starts)
        """Number of this rank's own batches, which come first."""
        if together and not given and len(starts) < num_eval_batches(count, batch_size, num_ranks=num_ranks):
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
