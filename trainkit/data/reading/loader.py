"""Batches for the training loop: from tickets to shards on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import DataHooks, UserTransform
from trainkit.data.reading.in_process import InProcessReader
from trainkit.data.reading.iterable import Stream, StreamReader
from trainkit.data.reading.positions import Positions
from trainkit.data.reading.reader import Reader
from trainkit.data.reading.sources import BatchSource, Gatherer, Memory, collated, whole_arrays
from trainkit.data.reading.workers import Workers
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Ticket


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
        device: the device of the batches.
        settings: the `loader` keys of the config.
        seed: the run's seed.
        num_steps: steps of the run; nothing is read past them.
        hooks: the code that the keys of `data` name.

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
        device: torch.device,
        settings: LoaderSettings,
        seed: int,
        num_steps: int,
        hooks: DataHooks = DataHooks(),  # noqa: B008 - frozen
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
            hooks=hooks,
        )
        self._plan, self._device, self._seed, self._transform = plan, device, seed, hooks.transform
        self._last: tuple[Ticket, list[Any]] | None = None
        self.wait_s = 0.0
        """Seconds that the training loop has spent in `fetch`."""

    def fetch(self, ticket: Ticket) -> list[Any]:
        """Return the batches of a ticket's shards, one per shard; empty for a ticket without shards.

        For the same ticket again (a retry after an overflow), it returns the same batches.

        Raises:
            DataError: a sample cannot be read or collated; names its index.
        """
        if not ticket.shards:
            return []
        if self._last is not None and self._last[0] == ticket:
            return self._last[1]
        started = perf_counter()
        batches = self._source.read(ticket)
        if self._transform is not None:
            batches = self._transformed(self._transform, ticket, batches)
        self._last = ticket, batches
        self.wait_s += perf_counter() - started
        return batches

    def _transformed(self, transform: UserTransform, ticket: Ticket, batches: Sequence[Any]) -> list[Any]:
        """Transform each shard, keyed by (seed, step, shard): alike on any rank, and after a resume."""
        sizes = [self._plan.shard_size(ticket.step, shard) for shard in ticket.shards]
        return [
            transform(batch, key=(self._seed, ticket.step, shard), size=size, device=self._device)
            for shard, batch, size in zip(ticket.shards, batches, sizes, strict=True)
        ]

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint with which a stream resumes without reading again; None if not needed."""
        return self._source.state() if isinstance(self._source, StreamReader) else None

    def load_state(self, state: dict[str, Any] | None) -> str | None:
        """Restore `state` before the first fetch of a resumed run.

        Returns:
            A line for the user about how a stream finds its position; None for datasets with random access.
        """
        return self._source.load_state(state) if isinstance(self._source, StreamReader) else None

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
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
    hooks: DataHooks,
) -> BatchSource:
    hooks.refuse_misfits(dataset, cache=settings.cache)
    if isinstance(dataset, Stream):
        return StreamReader(dataset, plan, device=device, settings=settings, seed=seed, collate=hooks.collate_function)
    positions = Positions(plan, hooks.order(dataset, seed=seed, shuffle=settings.shuffle))
    if hooks.collate is None:
        in_memory = _in_memory(dataset, positions, device=device, settings=settings)
        if in_memory is not None:
            return in_memory
    if settings.num_workers == 0:
        reader = Reader(dataset, seed=seed, collate=hooks.collate)
        return InProcessReader(reader, positions, shards_at=shards_at, num_steps=num_steps, device=device)
    return Workers(
        dataset,
        positions,
        seed=seed,
        shards_at=shards_at,
        num_steps=num_steps,
        device=device,
        settings=settings,
        collate=hooks.collate,
    )


def _in_memory(
    dataset: Any, positions: Positions, *, device: torch.device, settings: LoaderSettings
) -> BatchSource | None:
    """Return the source of a dataset that gives many samples at once; None for any other."""
    gather = getattr(dataset, "gather", None)
    if gather is not None and settings.cache is not False:
        return Gatherer(gather, positions, device=device)
    arrays = None if settings.cache is False else whole_arrays(dataset)
    if arrays is None and settings.cache is True:
        arrays = collated(dataset)
    return None if arrays is None else Memory(arrays, positions, device=device)
