"""Batches for the training loop: from tickets to shards on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from trainkit.data.hooks import Reading
from trainkit.data.reading.as_read import BatchesAsRead
from trainkit.data.reading.iterable import Stream, StreamReader
from trainkit.data.reading.source import Source
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.numerics.batch import BatchPlan, Positions, Request, Ticket


class Loader:
    """Batches by ticket, read ahead as the `Source` of the dataset does it.

    The batches of this rank's planned tickets are read ahead, from any step on, so that resuming costs nothing. A
    ticket of another step begins the reading there; one with other shards than planned, or that of the last step once
    more, is read alone, and the reading ahead continues.

    Args:
        dataset: the training split.
        plan: how its samples form steps and shards.
        shards_at: returns the shards of this rank at a step; used for reading ahead.
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
        hooks, settings, device = reading.hooks, reading.settings, reading.device
        if size_of(dataset) == 0:
            raise DataError(f"{type(dataset).__name__} is empty: it has no samples to train on.")
        if settings.pin_memory is True and device.type != "cuda":
            rule = f"pinned memory is for copies to a CUDA device, and this run is on {device.type}. Use auto."
            raise ConfigError([Problem(key="loader.pin_memory", value=True, rule=rule)])
        hooks.refuse_misfits(dataset, settings)
        self._stream: StreamReader | None = None
        if isinstance(dataset, Stream):
            self._stream = StreamReader(dataset, seed=reading.seed, collate=hooks.collate_function, plan=plan)
        self._source = Source(dataset, reading, trains=True, stream=self._stream)
        self._positions = Positions(plan, hooks.order(dataset, plan, seed=reading.seed, shuffle=settings.shuffle))
        self._shards_at, self._num_steps, self._reading = shards_at, num_steps, reading
        self._ahead: Generator[Any] | None = None
        self._asked: deque[tuple[Ticket, list[int]]] = deque()
        """Tickets whose batches are being read ahead, with the sizes of their shards."""
        self._next: Any = None
        """The batch of the first of them, once it was taken."""
        self._last: tuple[Ticket, BatchesAsRead] | None = None
        self._are_changed = False
        self.calls_own_code = hooks.transform is not None or self._source.calls_own_code
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
        sizes, batch = self._host_batch(ticket)
        batches = self._source.arrive(batch, sizes)
        if (transform := self._reading.hooks.transform) is None:
            return batches
        # keyed by (seed, step, shard): the same on any rank, and after a resume
        return [
            transform(batch, key=(self._reading.seed, ticket.step, shard), size=size, device=self._reading.device)
            for shard, batch, size in zip(ticket.shards, batches, sizes, strict=True)
        ]

    def _host_batch(self, ticket: Ticket) -> tuple[list[int], Any]:
        """Return the sizes of the shards, and their batch as it was read."""
        is_again = self._last is not None and self._last[0].step == ticket.step
        if self._stream is None and not is_again:  # what is read ahead would move the state of a stream
            is_next = self._has_next() and self._asked[0][0] == ticket
            if not is_next and ticket.shards == tuple(self._shards_at(ticket.step)):
                self._stop()
                self._ahead = self._source.ahead(self._requests(ticket.step))
                is_next = self._has_next()
            if is_next:
                batch, self._next = self._next, None
                return self._asked.popleft()[1], batch
        request = self._positions.request(ticket)
        return request[2], self._source.now(request)

    def _has_next(self) -> bool:
        """Take the batch of the first ticket of those asked for, unless that is done already."""
        if self._next is None and self._ahead is not None:
            self._next = next(self._ahead, None)
        return self._next is not None

    def _requests(self, step: int) -> Iterator[Request]:
        # Use separate positions: workers run ahead of the training, which must keep its cached block of positions.
        positions = Positions(self._positions.plan, self._positions.order)
        for later in range(step, self._num_steps):
            ticket = Ticket(later, tuple(self._shards_at(later)))
            if ticket.shards:
                request = positions.request(ticket)
                self._asked.append((ticket, request[2]))
                yield request

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint with which a stream resumes without reading again; None if not needed."""
        step = 0 if self._last is None else self._last[0].step + 1
        return None if self._stream is None else self._stream.state(step)

    def load_state(self, state: dict[str, Any] | None) -> str | None:
        """Restore `state` before the first fetch of a resumed run.

        Returns:
            A line for the user about how a stream finds its position; None for datasets with random access.
        """
        return None if self._stream is None else self._stream.load_state(state)

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        self._stop()
        self._last = None

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._next = None
        self._asked.clear()
