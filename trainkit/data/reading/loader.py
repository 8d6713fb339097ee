"""Batches for the training loop: from tickets to shards on the device, by workers, in this process or from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from trainkit.data.hooks import Reading, UserTransform
from trainkit.data.reading.as_read import BatchesAsRead
from trainkit.data.reading.collate import MoveBatch, narrow, refuse_other_rows, shards_of, tensors_in, to_device
from trainkit.data.reading.dealt import DealtReader
from trainkit.data.reading.in_process import InProcessReader
from trainkit.data.reading.iterable import Stream, StreamReader, stream_reader
from trainkit.data.reading.reader import Reader, result_without_draws
from trainkit.data.reading.workers import Workers
from trainkit.data.splits import size_of
from trainkit.data.stored import Stored, batch_mover, refuse_other_samples, stored_of, widening
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Positions, Ticket
from trainkit.numerics.copies import sent_to
from trainkit.numerics.generators import Untouched
from trainkit.objectives.fields import tuple_like

_CHUNK: Final = 1024
"""Number of samples collated at a time when a dataset is read into memory."""

_AHEAD_BYTES: Final = 1 << 20
"""Largest block of samples that is gathered at once: it stays in the second-level cache of a processor."""
_ALIGNMENT: Final = {"cpu": 64}
"""Kind of device -> bytes to which torch aligns the memory of a tensor."""
_OF_DEVICES: Final = 512
"""The same of every other kind of device: torch's allocator on CUDA."""

_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

Arrays = tuple[Tensor, ...] | dict[str, Tensor]
"""A whole dataset in memory: the first dim of every tensor is the sample."""


class BatchSource(Protocol):
    """One way to obtain batches."""

    def read(self, ticket: Ticket) -> list[Any]:
        """Return the batch of each of the ticket's shards (at least one), on the device."""

    def close(self) -> None:
        """Stop the processes that were started."""


class Memory:
    """Gathers shards from tensors with one `index_select` per tensor, on the device if they fit there.

    Small samples are gathered for a whole block of positions and cut into batches at once, which takes a quarter of the
    time for each batch.

    Args:
        arrays: all samples, as they are stored.
        positions: the samples of a ticket.
        device: the device of the batches.
        move: returns a gathered batch on the device, as the class documents it.
        widened: the conversion that `move` applies in addition to moving; None: no conversion.
    """

    def __init__(
        self,
        arrays: Arrays,
        positions: Positions,
        *,
        device: torch.device,
        move: MoveBatch,
        widened: MoveBatch | None = None,
    ) -> None:
        self._positions = positions
        wide = widened is not None and _fits(device, _bytes_of(widened(narrow(arrays, 0, 1))) * _length_of(arrays))
        if widened is not None and wide:
            arrays, widened = widened(to_device(arrays, device)), None
        # Wide samples are there already: less memory is free now, and they must not go back and be widened again.
        self._home = device if wide or _fits(device, _bytes_of(arrays)) else torch.device("cpu")
        self.is_on_device = self._home == device
        """Whether batches are gathered on the device that uses them."""
        self._arrive = widened if self.is_on_device else move
        self._keys = tuple(arrays) if isinstance(arrays, dict) else None
        self._make: Callable[[list[Tensor]], Any] = getattr(type(arrays), "_make", tuple)  # keeps names of a named one
        values = arrays.values() if isinstance(arrays, dict) else arrays
        # Torch gathers few unsigned types: view them as signed ones, which have the same bits.
        self._tensors = [
            (tensor.to(self._home).view(_SIGNED.get(tensor.dtype, tensor.dtype)), tensor.dtype) for tensor in values
        ]
        self._has_unsigned = any(bits.dtype != dtype for bits, dtype in self._tensors)
        self._row_bytes = [bits[:1].nbytes for bits, _ in self._tensors]
        self._version = 0
        self._block = torch.empty(0, dtype=torch.int64)
        self._ahead: _BatchesOfBlock | None = None

    def read(self, ticket: Ticket) -> list[Any]:
        """Gather; several shards are views of one gathered batch."""
        spans = self._positions.spans(ticket)
        if self._version != self._positions.version:
            self._enter_block(*spans[0])
        gathered = self._ahead.take(*spans[0]) if self._ahead is not None and len(spans) == 1 else None
        if gathered is None:
            parts = [self._block.narrow(0, start, stop - start) for start, stop in spans]
            gathered = self._gathered(parts[0] if len(parts) == 1 else torch.cat(parts))
        batch = self._make(gathered) if self._keys is None else dict(zip(self._keys, gathered, strict=True))
        if self._arrive is not None:
            batch = self._arrive(batch)
        return [batch] if len(ticket.shards) == 1 else shards_of(batch, self._positions.sizes(ticket))

    def _gathered(self, index: Tensor) -> list[Tensor]:
        gathered = [bits.index_select(0, index) for bits, _ in self._tensors]
        if self._has_unsigned:  # a view takes as long as a small operation
            gathered = [bits.view(dtype) for bits, (_, dtype) in zip(gathered, self._tensors, strict=True)]
        return gathered

    def _enter_block(self, start: int, stop: int) -> None:
        """Take the samples of a block of positions, of which this rank takes a range first."""
        self._version = self._positions.version
        self._block = sent_to(self._home, torch.from_numpy(self._positions.block))
        stride = self._positions.plan.global_size
        # Kernels may round differently where torch would place no tensor of its own.
        multiple = _ALIGNMENT.get(self._home.type, _OF_DEVICES)
        is_aligned = not any(row * place % multiple for row in self._row_bytes for place in (stride, start))
        is_small = len(self._block) * sum(self._row_bytes) <= _AHEAD_BYTES
        is_ahead = is_aligned and is_small and start % stride + stop - start <= stride <= len(self._block)
        self._ahead = _BatchesOfBlock(self._gathered(self._block), stride, (start, stop)) if is_ahead else None

    def close(self) -> None:
        """Do nothing: no process was started."""


class _BatchesOfBlock:
    """The samples of a block of positions, cut into batches; each is taken once, since user code may write into it.

    Args:
        tensors: each with a sample of every position.
        stride: positions of a batch of all ranks.
        first: the range of positions that this rank takes of one batch. It takes as much of every batch.
    """

    def __init__(self, tensors: Sequence[Tensor], stride: int, first: tuple[int, int]) -> None:
        count, begin, self._size = len(tensors[0]) // stride, first[0] % stride, first[1] - first[0]
        batches = [
            tensor[: count * stride].view(count, stride, *tensor.shape[1:]).narrow(1, begin, self._size).unbind()
            for tensor in tensors
        ]
        # `data`: what is written into one batch counts as a change of that batch alone.
        self._batches = {begin + k * stride: [one[k].data for one in batches] for k in range(count)}

    def take(self, start: int, stop: int) -> list[Tensor] | None:
        """Return the samples of a range of positions; None if they are no batch, or have been taken."""
        return self._batches.pop(start, None) if stop - start == self._size else None


class Gatherer:
    """Reads many samples at once from an in-memory dataset that has `gather(indices)`."""

    def __init__(self, gather: Callable[[Tensor], Any], positions: Positions, *, move: MoveBatch) -> None:
        self._gather = gather
        self._positions = positions
        self._move = move
        self._is_known = False

    def read(self, ticket: Ticket) -> list[Any]:
        """Gather on the host and move to the device; several shards are views of one gathered batch."""
        indices = torch.from_numpy(self._positions.indices(ticket))
        batch = self._move(self._gather(indices) if self._is_known else self._first(indices))
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
        refuse_other_rows(found, len(indices), "gather(indices)")
        self._is_known = True
        return found

    def close(self) -> None:
        """Do nothing: no process was started."""


def whole_arrays(dataset: Any) -> Arrays | None:
    """Return the result of an in-memory dataset's `tensors()`; None for any other dataset.

    Raises:
        DataError: it returns arrays, or tensors of other lengths.
    """
    offer = getattr(dataset, "tensors", None)
    if not callable(offer):
        return None
    with Untouched(seed=0):
        arrays: Arrays = offer()
    refuse_other_rows(arrays, len(dataset), f"{type(dataset).__name__}.tensors()")
    return arrays


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
        chunks = [reader.batch(0, range(start, min(start + _CHUNK, count))) for start in range(0, count, _CHUNK)]
    if reader.draws:
        rule = (
            f"the samples of {name} are random, and a cache would repeat those of the first "
            "epoch. Use loader.cache=false."
        )
        raise ConfigError([Problem(key="loader.cache", value=True, rule=rule)])
    first = chunks[0]
    if isinstance(first, dict) and _all_tensors(first.values()):
        return {key: torch.cat([chunk[key] for chunk in chunks]) for key in first}
    if isinstance(first, tuple) and _all_tensors(first):
        return tuple_like(first, map(torch.cat, zip(*chunks, strict=True)))
    raise DataError(
        f"a sample of {name} is not a tuple or dict of tensors and numbers: loader.cache=true cannot keep it."
    )


def _all_tensors(values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _fits(device: torch.device, num_bytes: int) -> bool:
    """Return whether `num_bytes` are less than a quarter of the device's free memory."""
    if device.type != "cuda":
        return device.type == "cpu"
    free, _ = torch.cuda.mem_get_info(device)
    return num_bytes < free // 4


def _bytes_of(arrays: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(arrays))


def _length_of(arrays: Arrays) -> int:
    return len(next(tensors_in(arrays)))


class Loader:
    """Batches by ticket, read in the fastest way that the dataset allows.

    - in memory (a dataset with `tensors()` or `gather(indices)`, or `loader.cache=true`), if no collate is set: one
    indexed gather per ticket;
    - `loader.num_workers=0`: samples are read and collated in this process, small batches several at a time;
    - workers: processes prefetch, from any step on, so that resuming costs nothing;
    - a `Stream`: read by position in its own order.

    The samples of a ticket, and the random numbers in them, are the same in all of these ways.

    Args:
        dataset: the training split.
        plan: how its samples form steps and shards.
        shards_at: returns the shards of this rank at a step; used for prefetching.
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
        if size_of(dataset) == 0:
            raise DataError(f"{type(dataset).__name__} is empty: it has no samples to train on.")
        if reading.settings.pin_memory is True and reading.device.type != "cuda":
            rule = f"pinned memory is for copies to a CUDA device, and this run is on {reading.device.type}. Use auto."
            raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
        self._source = _choose(dataset, plan, reading, shards_at=shards_at, num_steps=num_steps)
        self._plan, self._reading = plan, reading
        self._last: tuple[Ticket, BatchesAsRead] | None = None
        self._are_changed = False
        self.calls_own_code = reading.hooks.transform is not None or not isinstance(self._source, Memory | Workers)
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
        batches = self._source.read(ticket)
        if (transform := self._reading.hooks.transform) is not None:
            return self._transformed(transform, ticket, batches)
        return batches

    def _transformed(self, transform: UserTransform, ticket: Ticket, batches: Sequence[Any]) -> list[Any]:
        """Transform each shard, keyed by (seed, step, shard): the same on any rank, and after a resume."""
        sizes = [self._plan.shard_size(ticket.step, shard) for shard in ticket.shards]
        return [
            transform(batch, key=(self._reading.seed, ticket.step, shard), size=size, device=self._reading.device)
            for shard, batch, size in zip(ticket.shards, batches, sizes, strict=True)
        ]

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint with which a stream resumes without reading again; None if not needed."""
        return self._source.state() if isinstance(self._source, StreamReader | DealtReader) else None

    def load_state(self, state: dict[str, Any] | None) -> str | None:
        """Restore `state` before the first fetch of a resumed run.

        Returns:
            A line for the user about how a stream finds its position; None for datasets with random access.
        """
        return self._source.load_state(state) if isinstance(self._source, StreamReader | DealtReader) else None

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._source.close()
        self._last = None


def _choose(
    dataset: Any,
    plan: BatchPlan,
    reading: Reading,
    *,
    shards_at: Callable[[int], Sequence[int]],
    num_steps: int,
) -> BatchSource:
    hooks, settings, device, seed = reading.hooks, reading.settings, reading.device, reading.seed
    hooks.refuse_misfits(dataset, cache=settings.cache)
    if isinstance(dataset, Stream):
        return stream_reader(dataset, plan, device=device, settings=settings, seed=seed, collate=hooks.collate_function)
    positions = Positions(plan, hooks.order(dataset, seed=seed, shuffle=settings.shuffle))
    # A collate is called with the samples of the class.
    stored = stored_of(dataset) if hooks.collate is None else None
    if stored is not None:
        refuse_other_samples(dataset, stored)
    read = dataset if stored is None else stored.samples
    move = widening(batch_mover(device, settings), stored, device)
    if hooks.collate is None:
        in_memory = _in_memory(dataset, stored, positions, reading, move=move)
        if in_memory is not None:
            return in_memory
    if settings.num_processes == 0:
        reader = Reader(read, seed=seed, collate=hooks.collate)
        return InProcessReader(reader, positions, shards_at=shards_at, num_steps=num_steps, move=move)
    return Workers(read, positions, reading, shards_at=shards_at, num_steps=num_steps, move=move)


def _in_memory(
    dataset: Any,
    stored: Stored | None,
    positions: Positions,
    reading: Reading,
    *,
    move: MoveBatch,
) -> BatchSource | None:
    """Return the source of a dataset that gives many samples at once; None for any other."""
    settings = reading.settings
    read = dataset if stored is None else stored.samples
    gather = getattr(read, "gather", None)
    if gather is not None and settings.cache is not False:
        return Gatherer(gather, positions, move=move)
    arrays = None if settings.cache is False else whole_arrays(read)
    if arrays is None and settings.cache is True:
        arrays = collated(read, name=type(dataset).__name__)
    if arrays is None:
        return None
    widened = None if stored is None else stored.widened
    source = Memory(arrays, positions, device=reading.device, move=move, widened=widened)
    if source.is_on_device and settings.pin_memory is True:
        rule = "has no effect: the dataset is on the device, and no batch is copied to it. Use auto."
        raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
    return source
