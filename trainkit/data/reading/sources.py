"""Sources of batches, and those of datasets in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from trainkit.data.reading.collate import shards_of, to_device
from trainkit.data.reading.positions import Positions
from trainkit.data.reading.reader import Reader, result_without_draws
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import Untouched

_CHUNK: Final = 1024
"""Number of samples collated at a time when a dataset is read into memory."""

Arrays = tuple[Tensor, ...] | dict[str, Tensor]
"""A whole dataset in memory: the first dim of every tensor is the sample."""


class BatchSource(Protocol):
    """One way to obtain batches."""

    def read(self, ticket: Ticket) -> list[Any]:
        """Return the batch of each of the ticket's shards (at least one), on the device."""

    def close(self) -> None:
        """Stop what was started."""


class Memory:
    """Gathers shards from tensors with one `index_select` per tensor, on the device if they fit there."""

    def __init__(self, arrays: Arrays, positions: Positions, *, device: torch.device) -> None:
        self._positions = positions
        self._device = device
        self._home = device if _fits(arrays, device) else torch.device("cpu")
        self._keys = tuple(arrays) if isinstance(arrays, dict) else None
        values = arrays.values() if isinstance(arrays, dict) else arrays
        self._tensors = [tensor.to(self._home) for tensor in values]
        self._version = 0
        self._block = torch.empty(0, dtype=torch.int64)

    def read(self, ticket: Ticket) -> list[Any]:
        """Gather; several shards are views of one gathered batch."""
        index = self._index(ticket)
        gathered = tuple(tensor.index_select(0, index) for tensor in self._tensors)
        if self._home != self._device:
            gathered = to_device(gathered, self._device)
        batch: Any = gathered if self._keys is None else dict(zip(self._keys, gathered, strict=True))
        return [batch] if len(ticket.shards) == 1 else shards_of(batch, self._positions.sizes(ticket))

    def close(self) -> None:
        """Do nothing: no process was started."""

    def _index(self, ticket: Ticket) -> Tensor:
        spans = self._positions.spans(ticket)
        if self._version != self._positions.version:
            self._version = self._positions.version
            self._block = torch.from_numpy(self._positions.block).to(self._home)
        parts = [self._block[start:stop] for start, stop in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Gatherer:
    """Reads many samples at once from an in-memory dataset that has `gather(indices)`."""

    def __init__(self, gather: Callable[[Tensor], Any], positions: Positions, *, device: torch.device) -> None:
        self._gather = gather
        self._positions = positions
        self._device = device
        self._is_known = False

    def read(self, ticket: Ticket) -> list[Any]:
        """Gather on the host and move to the device; several shards are views of one gathered batch."""
        indices = torch.from_numpy(self._positions.indices(ticket))
        batch = to_device(self._gather(indices) if self._is_known else self._first(indices), self._device)
        return [batch] if len(ticket.shards) == 1 else shards_of(batch, self._positions.sizes(ticket))

    def _first(self, indices: Tensor) -> Any:
        """Read the first batch, and check whether the dataset draws random numbers while it gathers."""
        with Untouched(seed=0):
            found = result_without_draws(lambda: self._gather(indices))
        if found is None:
            raise DataError(
                "the dataset draws random numbers in gather, and random numbers of data are keyed by sample. "
                "Use loader.cache=false, which reads samples one at a time."
            )
        self._is_known = True
        return found

    def close(self) -> None:
        """Do nothing: no process was started."""


def whole_arrays(dataset: Any) -> Arrays | None:
    """Return the result of an in-memory dataset's `tensors()`; None for any other dataset.

    Raises:
        DataError: its tensors have different lengths.
    """
    offer = getattr(dataset, "tensors", None)
    if not callable(offer):
        return None
    with Untouched(seed=0):
        arrays: Arrays = offer()
    values = list(arrays.values()) if isinstance(arrays, dict) else list(arrays)
    lengths = [len(tensor) for tensor in values]
    if set(lengths) != {len(dataset)}:
        name = type(dataset).__name__
        raise DataError(f"{name}.tensors() gives lengths {lengths} for a dataset of {len(dataset)} samples.")
    return arrays


def collated(dataset: Any) -> Arrays:
    """Read a map-style dataset into memory, once.

    Raises:
        ConfigError: its samples are random: with a cache, every epoch would repeat those of the first.
        DataError: a sample is not a tuple or dict of tensors, or cannot be read.
    """
    reader = Reader(dataset, seed=0)
    count = len(dataset)
    with Untouched(seed=0):
        chunks = [reader.batch(0, range(start, min(start + _CHUNK, count))) for start in range(0, count, _CHUNK)]
    if reader.draws:
        rule = (
            f"the samples of {type(dataset).__name__} are random, and a cache would repeat those of the first "
            "epoch. Use loader.cache=false."
        )
        raise ConfigError([Problem(key="loader.cache", value=True, rule=rule)])
    first = chunks[0]
    if isinstance(first, dict) and _all_tensors(first.values()):
        return {key: torch.cat([chunk[key] for chunk in chunks]) for key in first}
    if isinstance(first, tuple) and _all_tensors(first):
        return tuple(torch.cat(column) for column in zip(*chunks, strict=True))
    name = type(dataset).__name__
    raise DataError(
        f"a sample of {name} is not a tuple or dict of tensors and numbers: loader.cache=true cannot keep it."
    )


def _all_tensors(values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _fits(arrays: Arrays, device: torch.device) -> bool:
    """Return whether the arrays take less than a quarter of the device's free memory."""
    if device.type != "cuda":
        return device.type == "cpu"
    values = arrays.values() if isinstance(arrays, dict) else arrays
    free, _ = torch.cuda.mem_get_info(device)
    return sum(tensor.nbytes for tensor in values) < free // 4
