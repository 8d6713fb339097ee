"""Datasets that can only be read sequentially."""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import resolve_target
from trainkit.data.declaration import Declared
from trainkit.data.reading.collate import CollateFunction
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import at_least, maths, unit
from trainkit.numerics.batch import BatchPlan, Order, Request, SampleOrder
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
class Stream:
    """An iterable dataset with a known number of samples per epoch: sample i is the i-th item.

    Every rank iterates the whole stream and keeps the items of its own shards, so that each sample is used exactly
    once, on any number of ranks. The order is the stream's own; a source with `set_epoch` receives the epoch. With
    `distribute=files` each shard of a step has files of its own (`DealtOrder`).

    Example:
        >>> stream = Stream(source=[(0.0, 1), (0.5, 0)], num_samples=2)
        >>> len(stream), stream[1]
        (2, (0.5, 0))
    """

    source: Any
    """Any iterable, which is iterated again for each epoch; usually a `_target_` of your own."""
    num_samples: Annotated[int, at_least(1), unit("samples")]
    """Samples of an epoch; the source must have at least as many."""
    val_source: Any = None
    """The source for validation; null for no validation."""
    val_num_samples: Annotated[int | None, at_least(1), unit("samples")] = None
    """Samples of the validation source."""
    distribute: Annotated[Literal["samples", "files", "auto"], maths(neutral="samples")] = "samples"
    """Unit that is divided among ranks: `samples` (each rank reads all of them) or `files`; auto: files, if every shard
    can have one.
    """
    split: Literal["train", "val"] = "train"
    """The split to read, which selects the source."""
    _begin: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """State of the source before its first iteration; empty until then."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if it has a source."""
        return ("train",) if node.get("val_source") is None else ("train", "val")

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return the length that the node gives, and the samples that the class of its source declares."""
        number, source = ("num_samples", "source") if split == "train" else ("val_num_samples", "val_source")
        node = keys.get(source)
        kind = resolve_target(node[TARGET]) if isinstance(node, Mapping) and TARGET in node else None
        declare = getattr(kind, "declare", None)
        draw = None if declare is None else declare(node, split).draw
        return Declared(num_samples=keys.get(number), draw=draw)

    def __post_init__(self) -> None:
        if (self.val_source is None) != (self.val_num_samples is None):
            rule = "data.val_source and data.val_num_samples belong together: give both, or neither."
            raise ConfigError([Problem(key="data.val_num_samples", value=self.val_num_samples, rule=rule)])
        if self.distribute == "files" and self.split == "train" and not has_files(self.source):
            rule = (
                "needs a source with files, sizes and read(file), as trainkit.data.JsonLines has, and "
                f"{type(self.source).__name__} lacks them. Use samples."
            )
            raise ConfigError([Problem(key="data.distribute", value="files", rule=rule)])

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        return self.num_samples if self.split == "train" else self.val_num_samples or 0

    def __getitem__(self, index: int) -> Any:
        """Return one item, reading from the start: to inspect one sample, not for training."""
        for position, item in enumerate(self.from_begin(0)):
            if position == index:
                return item
        raise self.too_short(index)

    def from_begin(self, epoch: int) -> Iterator[Any]:
        """Iterate an epoch from its first item, independent of the current position of the source."""
        if self._begin:
            self._current.load_state_dict(copy.deepcopy(self._begin["state"]))
        return self.items(epoch)

    def following(self, epoch: int) -> Iterator[Any]:
        """Iterate the epoch that follows a complete one; a source without `set_epoch` may count its epochs itself."""
        return self.from_begin(epoch) if hasattr(self._current, "set_epoch") else self.items(epoch)

    def items(self, epoch: int, state: dict[str, Any] | None = None) -> Iterator[Any]:
        """Iterate the source from its current position, or from the position of `state`."""
        if not self._begin and self._keeps_place:
            self._begin["state"] = copy.deepcopy(self._current.state_dict())
        if hasattr(self._current, "set_epoch"):
            self._current.set_epoch(epoch)
        if state is not None:
            self._current.load_state_dict(state)
        return iter(self._current)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the source's own state, if it has one that JSON can hold."""
        if not self._keeps_place:
            return None
        state: dict[str, Any] = self._current.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return None
        return state

    def files_for(self, num_shards: int) -> FileSource | None:
        """Return the source whose files are dealt to the shards of a step; None if samples are divided among ranks."""
        source = self._current
        if self.distribute == "samples" or not has_files(source):
            return None
        return source if self.distribute == "files" or len(source.files) >= num_shards else None

    def order(self, plan: BatchPlan) -> Order:
        """Return the item at each position of an epoch: an index in the stream, or in the sequence of all files."""
        is_dealt = self.files_for(plan.num_shards(0)) is not None
        return DealtOrder(plan) if is_dealt else SampleOrder(num_samples=len(self), seed=0, shuffle=False)

    def too_short(self, position: int) -> DataError:
        """Return the error of a source that ends before its `num_samples`."""
        name = type(self._current).__name__
        return DataError(f"{name} ended after {position} samples, but num_samples={len(self)}.")

    @property
    def _keeps_place(self) -> bool:
        return hasattr(self._current, "state_dict") and hasattr(self._current, "load_state_dict")

    @property
    def _current(self) -> Any:
        return self.source if self.split == "train" else self.val_source


class DealtOrder:
    """The sample of the sequence of all files at each position of an epoch, if files are dealt to the shards of a step.

    The sequence is cut into as many parts as a step has shards, and shard s of every step takes the next samples of
    part s, so that a rank reads the files of its own shards only. The samples of a shard depend on the step and the
    shard alone: ranks need no communication, and a run resumes on any number of ranks as long as the cut of a step is
    the same.

    Example:
        >>> order = DealtOrder(BatchPlan(num_samples=10, global_size=4, micro_size=2))
        >>> order.indices(0, 0, 10)
        array([0, 1, 6, 7, 2, 3, 8, 9, 4, 5])
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._global_size, self._num_whole = plan.global_size, plan.num_samples // plan.global_size
        shards, last_step = range(plan.num_shards(0)), plan.steps_per_epoch - 1
        # A short last step may have fewer shards than the others.
        rest = range(plan.num_shards(last_step) if last_step >= self._num_whole else 0)
        whole = [plan.shard_size(0, shard) if self._num_whole else 0 for shard in shards]
        last = [plan.shard_size(last_step, shard) if shard in rest else 0 for shard in shards]
        begins = [0, *accumulate(self._num_whole * full + short for full, short in zip(whole, last, strict=True))]
        self._first = np.concatenate([begin + np.arange(size) for begin, size in zip(begins, whole, strict=False)])
        self._stride = np.repeat(whole, whole)
        ends = [begin + self._num_whole * size for begin, size in zip(begins, whole, strict=False)]
        self._last = np.concatenate([end + np.arange(size) for end, size in zip(ends, last, strict=True)])

    def indices(self, _epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch, (stop - start,) int64."""
        step, within = np.divmod(np.arange(start, stop), self._global_size)
        samples, is_whole = np.empty(stop - start, dtype=np.int64), step < self._num_whole
        samples[is_whole] = self._first[within[is_whole]] + step[is_whole] * self._stride[within[is_whole]]
        samples[~is_whole] = self._last[within[~is_whole]]
        return samples


class StreamReader:
    """Reads the samples of requests from a sequence: a stream, or all files of its source, each file from its start.

    Going back restarts the epoch of a stream. Random numbers drawn while a sample is read depend on (seed, epoch, index
    in the sequence) alone.

    Args:
        stream: the stream.
        seed: keys the random numbers.
        collate: makes the batch of a shard.
        plan: how samples form steps and shards, by which files may be dealt; None: the whole stream is read.

    Raises:
        ConfigError: the files have fewer samples than an epoch.
    """

    def __init__(self, stream: Stream, *, seed: int, collate: CollateFunction, plan: BatchPlan | None = None) -> None:
        self._stream, self._seed, self._collate, self._plan = stream, seed, collate, plan
        self._files = None if plan is None else stream.files_for(plan.num_shards(0))
        self._starts = [0, *accumulate([len(stream)] if self._files is None else self._files.sizes)]
        self._epoch = -1
        self._open: dict[int, Iterator[Any]] = {}
        """Index of the next sample -> the iterator that gives it; one for each part that is read."""
        if plan is not None and self._starts[-1] < plan.num_samples:
            rule = f"is more than the {self._starts[-1]:,} samples that data.source.sizes adds up to."
            raise ConfigError([Problem(key="data.num_samples", value=plan.num_samples, rule=rule)])

    def ahead(self, requests: Iterable[Request]) -> Generator[list[Any]]:
        """Yield the batches of each request, one for each shard; none is read before it is asked for.

        Raises:
            DataError: the stream, or a file, has another number of samples.
        """
        for request in requests:
            yield self._read(*request)

    def _read(
        self, epoch: int, indices: NDArray[np.int64], sizes: Sequence[int], keys: Sequence[int] | None = None
    ) -> list[Any]:
        """Return the batch of each shard; arguments are those of `Reader.read`."""
        positions: list[int] = indices.tolist()
        keys, ends, batches = positions if keys is None else keys, list(accumulate(sizes)), dict[int, Any]()
        with Untouched(seed=0):
            # in the order of the stream, which skips the shards of other ranks
            for start, end in sorted(zip([0, *ends], ends, strict=False), key=lambda span: positions[span[0]]):
                samples = [self._sample(epoch, index) for index in positions[start:end]]
                seed_host(shard_key(self._seed, epoch, keys[start]))
                batches[end] = self._collate(samples, positions[start:end])
        return [batches[end] for end in ends]

    def _sample(self, epoch: int, index: int) -> Any:
        number = bisect_right(self._starts, index) - 1
        follows = epoch == self._epoch + 1 and len(self._stream) in self._open
        if epoch != self._epoch:
            self._epoch, self._open = epoch, {}
        before = [start for start in self._open if start == index or (self._files is None and start < index)]
        if before:
            start = before[0]
            items = self._open.pop(start)
        else:
            start = self._starts[number]
            seed_host(sample_key(self._seed, epoch, -1 - number))
            if self._files is not None:
                items = iter(self._files.read(self._files.files[number]))
            else:
                self._open.clear()
                items = self._stream.following(epoch) if follows else self._stream.from_begin(epoch)
        for position in range(start, index + 1):
            seed_host(sample_key(self._seed, epoch, position))
            if (item := next(items, _END)) is _END:
                raise self._ended(number, position - self._starts[number])
        if self._files is not None and index + 1 == self._starts[number + 1]:
            if next(items, _END) is not _END:
                rule = f"holds more than the {self._files.sizes[number]} samples of data.source.sizes."
                raise DataError(f"{self._files.files[number]} {rule}")
        else:
            self._open[index + 1] = items
        return item

    def _ended(self, number: int, position: int) -> DataError:
        if self._files is None:
            return self._stream.too_short(position)
        name, size = self._files.files[number], self._files.sizes[number]
        return DataError(f"{name} ended after {position} samples, but data.source.sizes gives {size}.")

    @property
    def _cut(self) -> list[int]:
        """Return what determines the samples of a shard where files are dealt; else nothing."""
        assert self._plan is not None
        return [] if self._files is None else [self._plan.num_samples, self._plan.global_size, self._plan.num_shards(0)]

    def state(self, step: int) -> dict[str, Any]:
        """Return the state before a step: how files are dealt, or the position and the source's own state."""
        assert self._plan is not None
        begun = {"cut": self._cut, "inside_epoch": step % self._plan.steps_per_epoch != 0}
        if self._files is not None:  # positions follow from the step
            return {"distribute": "files", **begun}
        position = next(iter(self._open), 0)
        return {**begun, "epoch": self._epoch, "position": position, "source": self._stream.state_dict()}

    def load_state(self, state: dict[str, Any] | None) -> str:
        """Restore a position if the source can; otherwise the first read skips samples; return a line that says how.

        Raises:
            ConfigError: the epoch was begun with another cut of a step, so that samples would be read twice or never.
        """
        self._refuse_other_cut(state or {})
        if self._files is not None:
            return "each shard reads the same files of the stream as before; each part continues inside its file"
        if state is None:
            return (
                "the checkpoint has no state of the stream: its position is found by skipping from the start of the "
                "epoch"
            )
        source = state.get("source")
        if source is None or state["epoch"] < 0:
            return "the stream has no state_dict: its position is found by skipping from the start of the epoch"
        self._epoch, position = state["epoch"], state["position"]
        self._open = {position: self._stream.items(self._epoch, source)}
        return f"the stream resumes from its own state, at sample {position} of epoch {self._epoch}"

    def _refuse_other_cut(self, state: dict[str, Any]) -> None:
        assert self._plan is not None
        match state.get("cut"):
            case [_, _, int(old)] if old > 0:
                shards, before = str(old), f"batch.micro_size={-(-self._plan.global_size // old)}"
            case _:
                shards, before = "another number of", "batch.micro_size as before"
        if state.get("inside_epoch") and state.get("cut", []) != self._cut:
            rule = (
                f"cuts a step into {self._plan.num_shards(0)} shards, and the epoch began with {shards}. Each file "
                f"belongs to a shard: samples would be read twice or never. Give {before}."
            )
            raise ConfigError([Problem(key="batch.micro_size", value=self._plan.micro_size, rule=rule)])
