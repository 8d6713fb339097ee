"""Datasets that can only be read sequentially."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.config.values import at_least
from trainkit.data.reading.collate import CollateFunction, collate, to_device
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.generators import Untouched, seed_host
from trainkit.numerics.randomness import sample_key, shard_key


@dataclass(frozen=True, kw_only=True)
class Stream:
    """An iterable dataset with a known number of samples per epoch: sample i is the i-th item.

    Every rank iterates the whole stream and keeps the items of its own shards, so that each sample is used exactly
    once, on any number of ranks. The order is the stream's own; a source with `set_epoch` receives the epoch.

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
    split: Literal["train", "val"] = "train"
    """Which of the two sources."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if it has a source."""
        return ("train",) if node.get("val_source") is None else ("train", "val")

    def __post_init__(self) -> None:
        if (self.val_source is None) != (self.val_num_samples is None):
            rule = "data.val_source and data.val_num_samples belong together: give both, or neither."
            raise ConfigError([Problem(key="data.val_num_samples", value=self.val_num_samples, rule=rule)])

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        return self.num_samples if self.split == "train" else self.val_num_samples or 0

    def __getitem__(self, index: int) -> Any:
        """Return one item, reading from the start: to inspect one sample, not for training."""
        for position, item in enumerate(self.items(0)):
            if position == index:
                return item
        raise self.too_short(index)

    def items(self, epoch: int, state: dict[str, Any] | None = None) -> Iterator[Any]:
        """Iterate an epoch from its start, or from the position of `state`."""
        if hasattr(self._current, "set_epoch"):
            self._current.set_epoch(epoch)
        if state is not None:
            self._current.load_state_dict(state)
        return iter(self._current)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the source's own state, if it has one that JSON can hold."""
        give = getattr(self._current, "state_dict", None)
        if give is None or not hasattr(self._current, "load_state_dict"):
            return None
        state: dict[str, Any] = give()
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return None
        return state

    def too_short(self, position: int) -> DataError:
        """Return the error of a source that ends before its `num_samples`."""
        name = type(self._current).__name__
        return DataError(f"{name} ended after {position} samples, but num_samples={len(self)}.")

    @property
    def _current(self) -> Any:
        return self.source if self.split == "train" else self.val_source


class StreamReader:
    """Reads the shards of a stream by position; going back restarts the epoch.

    Random numbers drawn while an item is read depend on (seed, epoch, position) alone.
    """

    def __init__(
        self,
        stream: Stream,
        plan: BatchPlan,
        *,
        device: torch.device,
        settings: LoaderSettings,
        seed: int,
        collate: CollateFunction = collate,
    ) -> None:
        if settings.num_workers:
            rule = (
                "an iterable dataset is read by the training process, in its own order. Use 0, or give the dataset "
                "__len__ and __getitem__, so that workers can read its samples."
            )
            raise ConfigError([Problem(key="loader.num_workers", value=settings.num_workers, rule=rule)])
        if settings.cache is True:
            rule = "an iterable dataset cannot be cached. Use auto."
            raise ConfigError([Problem(key="loader.cache", value=True, rule=rule)])
        self._stream = stream
        self._plan = plan
        self._device = device
        self._seed = seed
        self._collate = collate
        self._epoch = -1
        self._position = 0
        self._items: Iterator[Any] = iter(())

    def read(self, ticket: Ticket) -> list[Any]:
        """Read the shards in stream order, skipping those of other ranks; return them in the ticket's order."""
        with Untouched(seed=0):
            found = {shard: self._shard(*self._plan.shard_range(ticket.step, shard)) for shard in sorted(ticket.shards)}
        return [found[shard] for shard in ticket.shards]

    def state(self) -> dict[str, Any]:
        """Return epoch and position, and the source's own state if it has one."""
        return {"epoch": self._epoch, "position": self._position, "source": self._stream.state_dict()}

    def load_state(self, state: dict[str, Any] | None) -> str:
        """Restore a position if the source can; otherwise the first read skips items from the start of its epoch."""
        if state is None:
            return (
                "the checkpoint has no state of the stream: its place is found by skipping from the front of the epoch"
            )
        source = state.get("source")
        if source is None or state["epoch"] < 0:
            return "the stream has no state_dict: its place is found by skipping from the front of the epoch"
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
            self._items = self._stream.items(epoch)
            self._epoch, self._position = epoch, 0
        for _ in range(start - self._position):
            self._next()
        samples = [self._next() for _ in range(stop - start)]
        seed_host(shard_key(self._seed, epoch, start))
        batch = self._collate(samples, range(start, stop))
        return to_device(batch, self._device)

    def _next(self) -> Any:
        seed_host(sample_key(self._seed, self._epoch, self._position))
        try:
            item = next(self._items)
        except StopIteration:
            raise self._stream.too_short(self._position) from None
        self._position += 1
        return item
