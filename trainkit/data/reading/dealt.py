"""Streams whose files are dealt to the shards of a step, so that a rank reads the files of its own shards only.

The concatenated files are one sequence of samples. It is cut into as many parts as a step has shards, and shard s of
every step takes the next samples of part s. The samples that a rank reads depend only on the step and the shard: ranks
need no communication, and a run resumes on any number of ranks as long as the cut of a step is the same.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

from trainkit.data.reading.collate import CollateFunction, MoveBatch
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.generators import Untouched, seed_host
from trainkit.numerics.randomness import sample_key, shard_key

_END: Final = object()


class FileSource(Protocol):
    """A source of a stream that knows its files: required by `data.distribute=files`."""

    @property
    def files(self) -> Sequence[str]:
        """Names of the files, in their order."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each file."""

    def read(self, file: str) -> Iterator[Any]:
        """Iterate the samples of one file from its start."""


def has_files(source: object) -> TypeGuard[FileSource]:
    """Return whether a source is a `FileSource`, without reading its properties: `sizes` may read every file.

    Example:
        >>> has_files([1, 2])
        False
    """
    names = {*dir(type(source)), *getattr(source, "__dict__", ())}
    return names >= {"files", "sizes", "read"}


@dataclass(frozen=True, kw_only=True)
class DealtOrder:
    """Maps each position of a step to a sample of the sequence of all files.

    Example:
        >>> order = DealtOrder(plan=BatchPlan(num_samples=10, global_size=4, micro_size=2))
        >>> [order.first(step, shard) for step in range(3) for shard in range(order.plan.num_shards(step))]
        [0, 6, 2, 8, 4]
    """

    plan: BatchPlan

    def first(self, step: int, shard: int) -> int:
        """Return the index, in the sequence of all files, of the first sample of a shard."""
        within = step % self.plan.steps_per_epoch
        return self._before(shard) + min(within, self._full_steps) * self._size(shard)

    def indices(self, ticket: Ticket) -> list[int]:
        """Return the samples of a ticket's shards, as indices of the sequence of all files."""
        sizes = [self.plan.shard_size(ticket.step, shard) for shard in ticket.shards]
        starts = [self.first(ticket.step, shard) for shard in ticket.shards]
        return [start + item for start, size in zip(starts, sizes, strict=True) for item in range(size)]

    @property
    def num_parts(self) -> int:
        """Number of parts that the sequence is cut into: the shards of a whole step."""
        return self.plan.num_shards(0)

    @property
    def _full_steps(self) -> int:
        return self.plan.num_samples // self.plan.global_size

    def _size(self, shard: int) -> int:
        """Return the samples of a shard of a whole step; 0 where an epoch has none."""
        return self.plan.shard_size(0, shard) if self._full_steps else 0

    def _before(self, shard: int) -> int:
        """Return the samples of the parts before that of a shard."""
        whole = sum(self._size(earlier) for earlier in range(shard)) * self._full_steps
        last = self.plan.steps_per_epoch - 1
        if last < self._full_steps:
            return whole
        return whole + sum(
            self.plan.shard_size(last, earlier) for earlier in range(min(shard, self.plan.num_shards(last)))
        )


class DealtReader:
    """Reads the shards of a stream from the files that hold them, each file from its start.

    Random numbers drawn while a sample is read depend on (seed, epoch, index of the sample in all files) alone.
    """

    def __init__(
        self, source: FileSource, plan: BatchPlan, *, move: MoveBatch, seed: int, collate: CollateFunction
    ) -> None:
        self._source, self._plan, self._move, self._seed, self._collate = source, plan, move, seed, collate
        self._order = DealtOrder(plan=plan)
        self._starts = [0, *itertools.accumulate(source.sizes)]
        self._parts: dict[int, _OpenFile] = {}
        self._step = 0
        if self._starts[-1] < plan.num_samples:
            rule = f"is more than the {self._starts[-1]:,} samples that data.source.sizes adds up to."
            raise ConfigError([Problem(key="data.num_samples", value=plan.num_samples, rule=rule)])

    def read(self, ticket: Ticket) -> list[Any]:
        """Read the shards of a ticket, in its order."""
        self._step = ticket.step + 1
        with Untouched(seed=0):
            found = [self._shard(ticket.step, shard) for shard in ticket.shards]
        batches: list[Any] = self._move(found)
        return batches

    def state(self) -> dict[str, Any]:
        """Return how the files are dealt, for the check of a resume; positions follow from the step."""
        plan = self._plan
        return {
            "distribute": "files",
            "cut": [plan.num_samples, plan.global_size, self._order.num_parts],
            "inside_epoch": self._step % plan.steps_per_epoch != 0,
        }

    def load_state(self, state: dict[str, Any] | None) -> str:
        """Check that the files were dealt in the same way; the first read of each part finds its position.

        Raises:
            ConfigError: the epoch was begun with another cut of a step, so that samples would be read twice or never.
        """
        cut = [self._plan.num_samples, self._plan.global_size, self._order.num_parts]
        if state is not None and state.get("inside_epoch") and state.get("cut") != cut:
            old = state.get("cut")
            shards = old[2] if isinstance(old, list) and len(old) == 3 else "another number of"
            rule = (
                f"cuts a step into {cut[2]} shards, and the epoch began with {shards}. Each file belongs to a "
                f"shard: samples would be read twice or never. Give batch.micro_size={self._micro_size_of(old)}."
            )
            raise ConfigError([Problem(key="batch.micro_size", value=self._plan.micro_size, rule=rule)])
        return "each shard reads the same files of the stream as before; each part continues inside its file"

    def close(self) -> None:
        """Release the files."""
        self._parts.clear()

    def _micro_size_of(self, cut: Any) -> int:
        fits = isinstance(cut, list) and len(cut) == 3 and isinstance(cut[2], int) and cut[2] > 0
        return -(-self._plan.global_size // cut[2]) if fits else self._plan.micro_size

    def _shard(self, step: int, shard: int) -> Any:
        epoch, start, stop = self._plan.shard_range(step, shard)
        first = self._order.first(step, shard)
        samples = [self._sample(shard, epoch, index) for index in range(first, first + stop - start)]
        seed_host(shard_key(self._seed, epoch, start))
        return self._collate(samples, range(first, first + stop - start))

    def _sample(self, shard: int, epoch: int, index: int) -> Any:
        number = bisect_right(self._starts, index) - 1
        inside = index - self._starts[number]
        part = self._parts.get(shard)
        if part is None or (part.epoch, part.number) != (epoch, number) or part.position > inside:
            part = self._parts[shard] = _OpenFile(epoch=epoch, number=number, items=self._open(epoch, number))
        while part.position < inside:
            self._next(part)
        return self._next(part)

    def _open(self, epoch: int, number: int) -> Iterator[Any]:
        seed_host(sample_key(self._seed, epoch, -1 - number))
        return iter(self._source.read(self._source.files[number]))

    def _next(self, part: _OpenFile) -> Any:
        seed_host(sample_key(self._seed, part.epoch, self._starts[part.number] + part.position))
        size, name = self._source.sizes[part.number], self._source.files[part.number]
        item = next(part.items, _END)
        if item is _END:
            raise DataError(f"{name} ended after {part.position} samples, but data.source.sizes gives {size}.")
        part.position += 1
        if part.position == size and next(part.items, _END) is not _END:
            raise DataError(f"{name} holds more than the {size} samples of data.source.sizes.")
        return item


@dataclass(kw_only=True)
class _OpenFile:
    """The open file of one part of the sequence."""

    epoch: int
    number: int
    """Index of the file in the list."""
    items: Iterator[Any]
    position: int = 0
    """Index of the next sample of the file."""
