"""Datasets that can only be read sequentially."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import resolve_target
from trainkit.data.declaration import Declared
from trainkit.data.reading.collate import CollateFunction, MoveBatch, collate
from trainkit.data.reading.dealt import DealtReader, FileSource, has_files
from trainkit.data.stored import batch_mover
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import at_least, maths
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.generators import Untouched, seed_host
from trainkit.numerics.randomness import sample_key, shard_key


@dataclass(frozen=True, kw_only=True)
class Stream:
    """An iterable dataset with a known number of samples per epoch: sample i is the i-th item.

    Every rank iterates the whole stream and keeps the items of its own shards, so that each sample is used exactly
    once, on any number of ranks. The order is the stream's own; a source with `set_epoch` receives the epoch. With
    `distribute=files` each shard of a step has files of its own (`trainkit.data.reading.dealt`).

    Example:
        >>> stream = Stream(source=[(0.0, 1), (0.5, 0)], num_samples=2)
        >>> len(stream), stream[1]
        (2, (0.5, 0))
    """

    source: Any
    """Any iterable, which is iterated again for each epoch; usually a `_target_` of your own."""
    num_samples: Annotated[int, at_least(1)]
    """Samples of an epoch; the source must have at least as many."""
    val_source: Any = None
    """The source for validation; null for no validation."""
    val_num_samples: Annotated[int | None, at_least(1)] = None
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


def stream_reader(
    stream: Stream,
    plan: BatchPlan,
    *,
    device: torch.device,
    settings: LoaderSettings,
    seed: int,
    collate: CollateFunction = collate,
) -> StreamReader | DealtReader:
    """Return the reader of a stream.

    Raises:
        ConfigError: a key of `loader` or `data` is not possible with this stream.
    """
    if settings.num_processes:
        rule = (
            "an iterable dataset is read by the training process, in its own order. Use 0, or give the dataset "
            "__len__ and __getitem__, so that workers can read its samples."
        )
        raise ConfigError([Problem(key="loader.num_workers", value=settings.num_workers, rule=rule)])
    if settings.cache is True:
        rule = "an iterable dataset cannot be cached. Use auto."
        raise ConfigError([Problem(key="loader.cache", value=True, rule=rule)])
    move, files = batch_mover(device, settings), stream.files_for(plan.num_shards(0))
    if files is not None:
        return DealtReader(files, plan, move=move, seed=seed, collate=collate)
    return StreamReader(stream, plan, move=move, seed=seed, collate=collate)


class StreamReader:
    """Reads the shards of a stream by position; going back restarts the epoch.

    Random numbers drawn while an item is read depend on (seed, epoch, position) alone.
    """

    def __init__(
        self,
        stream: Stream,
        plan: BatchPlan,
        *,
        move: MoveBatch,
        seed: int,
        collate: CollateFunction = collate,
    ) -> None:
        self._stream = stream
        self._plan = plan
        self._move = move
        self._seed = seed
        self._collate = collate
        self._epoch = -1
        self._position = 0
        self._items: Iterator[Any] = iter(())

    def read(self, ticket: Ticket) -> list[Any]:
        """Read the shards in stream order, skipping those of other ranks; return them in the ticket's order."""
        with Untouched(seed=0):
            found = {shard: self._shard(*self._plan.shard_range(ticket.step, shard)) for shard in sorted(ticket.shards)}
        batches: list[Any] = self._move([found[shard] for shard in ticket.shards])
        return batches

    def state(self) -> dict[str, Any]:
        """Return epoch and position, and the source's own state if it has one."""
        return {"epoch": self._epoch, "position": self._position, "source": self._stream.state_dict()}

    def load_state(self, state: dict[str, Any] | None) -> str:
        """Restore a position if the source can; otherwise the first read skips items from the start of its epoch."""
        if state is None:
            return (
                "the checkpoint has no state of the stream: its position is found by skipping from the start of the "
                "epoch"
            )
        source = state.get("source")
        if source is None or state["epoch"] < 0:
            return "the stream has no state_dict: its position is found by skipping from the start of the epoch"
        self._items = self._stream.items(state["epoch"], source)
        self._epoch, self._position = state["epoch"], state["position"]
        return f"the stream resumes from its own state, at sample {self._position} of epoch {self._epoch}"

    def close(self) -> None:
        """Release the iterator."""
        self._items = iter(())
        self._epoch = -1

    def _shard(self, epoch: int, start: int, stop: int) -> Any:
        if epoch != self._epoch or start < self._position:
            seed_host(sample_key(self._seed, epoch, -1))
            follows = epoch == self._epoch + 1 and self._position == len(self._stream)
            self._items = self._stream.following(epoch) if follows else self._stream.from_begin(epoch)
            self._epoch, self._position = epoch, 0
        for _ in range(start - self._position):
            self._next()
        samples = [self._next() for _ in range(stop - start)]
        seed_host(shard_key(self._seed, epoch, start))
        return self._collate(samples, range(start, stop))

    def _next(self) -> Any:
        seed_host(sample_key(self._seed, self._epoch, self._position))
        try:
            item = next(self._items)
        except StopIteration:
            raise self._stream.too_short(self._position) from None
        self._position += 1
        return item
