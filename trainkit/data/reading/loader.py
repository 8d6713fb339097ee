"""What the training loop asks for batches: tickets in, shards on the device out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from trainkit.config.schema import LoaderConfig as LoaderSettings
from trainkit.data.reading.in_process import InProcessReader
from trainkit.data.reading.iterable import Stream, StreamReader
from trainkit.data.reading.positions import Positions
from trainkit.data.reading.reader import Reader
from trainkit.data.reading.sources import BatchSource, Gatherer, Memory, collated, whole_arrays
from trainkit.data.reading.workers import Workers
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.order import SampleOrder

__all__ = ["Loader"]


class Loader:
    """Batches by ticket, by the fastest way that the dataset allows.

    - in memory (a dataset with `tensors()` or `gather(indices)`, or `loader.cache=true`): one indexed gather a ticket;
    - `loader.num_workers=0`: samples are read and collated here, small batches several at a time;
    - workers: read ahead by processes, from any step on, so that resuming costs nothing;
    - a `Stream`: read by position in its own order.

    Which samples a ticket holds, and what is random in them, is the same on all of them.

    Args:
        dataset: the training split.
        plan: how its samples become steps and shards.
        shards_at: the shards that this rank will be asked for at a step; what is read ahead goes by it.
        device: where batches are wanted.
        settings: the `loader` keys of the config.
        seed: the run's seed.
        num_steps: steps of the run; nothing is read ahead past them.

    Raises:
        ConfigError: a setting that this dataset or device cannot follow.
        DataError: the dataset is empty or says no length.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        plan: BatchPlan,
        shards_at: Callable[[int], Sequence[int]],
        device: torch.device,
        settings: LoaderSettings,
        seed: int,
        num_steps: int,
    ) -> None:
        if size_of(dataset) == 0:
            raise DataError(f"{type(dataset).__name__} is empty: it has no samples to train on.")
        if settings.pin_memory is True and device.type != "cuda":
            rule = f"pinned memory serves copies to a CUDA device, and this run is on {device.type}. Use auto."
            raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
        self._source = _choose(
            dataset,
            plan=plan,
            shards_at=shards_at,
            device=device,
            settings=settings,
            seed=seed,
            num_steps=num_steps,
        )
        self._last: tuple[Ticket, list[Any]] | None = None
        self.wait_s = 0.0
        """Seconds the training loop has spent in `fetch`."""

    def fetch(self, ticket: Ticket) -> list[Any]:
        """The batches of a ticket's shards, one a shard; empty for a ticket without shards.

        Asked for the same ticket again (a retry after an overflow), it gives the same batches.

        Raises:
            DataError: a sample cannot be read or collated; its index is named.
        """
        if not ticket.shards:
            return []
        if self._last is not None and self._last[0] == ticket:
            return self._last[1]
        started = perf_counter()
        batches = self._source.read(ticket)
        self._last = ticket, batches
        self.wait_s += perf_counter() - started
        return batches

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps so that a stream resumes without reading what it has read; None: nothing needed."""
        return self._source.state() if isinstance(self._source, StreamReader) else None

    def load_state(self, state: dict[str, Any] | None) -> str | None:
        """Take up `state` before the first fetch of a resumed run.

        Returns:
            A line for the user on how a stream finds its place; None for datasets with random access.
        """
        return self._source.load_state(state) if isinstance(self._source, StreamReader) else None

    def close(self) -> None:
        """End workers. Safe to call twice."""
        self._source.close()
        self._last = None


def _choose(
    dataset: Any,
    *,
    plan: BatchPlan,
    shards_at: Callable[[int], Sequence[int]],
    device: torch.device,
    settings: LoaderSettings,
    seed: int,
    num_steps: int,
) -> BatchSource:
    if isinstance(dataset, Stream):
        return StreamReader(dataset, plan, device=device, settings=settings, seed=seed)
    positions = Positions(plan, SampleOrder(num_samples=plan.num_samples, seed=seed, shuffle=settings.shuffle))
    gather = getattr(dataset, "gather", None)
    if gather is not None and settings.cache is not False:
        return Gatherer(gather, positions, device=device)
    arrays = None if settings.cache is False else whole_arrays(dataset)
    if arrays is None and settings.cache is True:
        arrays = collated(dataset)
    if arrays is not None:
        return Memory(arrays, positions, device=device)
    if settings.num_workers == 0:
        reader = Reader(dataset, seed=seed)
        return InProcessReader(reader, positions, shards_at=shards_at, num_steps=num_steps, device=device)
    return Workers(
        dataset,
        positions,
        seed=seed,
        shards_at=shards_at,
        num_steps=num_steps,
        device=device,
        settings=settings,
    )
