"""Batches of a map-style dataset that is read in this process, between the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.data.reading.collate import to_device
from trainkit.data.reading.positions import Positions
from trainkit.data.reading.reader import Reader
from trainkit.data.reading.sources import shards_of
from trainkit.errors import DataError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import Untouched

__all__ = ["InProcessReader"]

_BURST: Final = 16
"""Batches read at a time, at most."""
_BURST_BYTES: Final = 1 << 20
"""What they may hold together."""
_BURST_S: Final = 2e-3
"""How long the next step waits for batches that are not its own."""


class InProcessReader:
    """Reads samples here, several batches at a time where they are small and quick.

    Reading and stepping push each other out of the processor's caches: taking turns, a step of a small model and the
    reading of its batch took about a sixth longer than the two alone. A burst of reading every few steps pays that
    once. Batches that are large, or slow to read, are read one at a time.

    Args:
        reader: reads samples.
        positions: which samples a ticket asks for.
        shards_at: the shards that will be asked for at a step.
        num_steps: steps of the run; nothing is read past them.
        device: where batches are wanted.
    """

    def __init__(
        self,
        reader: Reader,
        positions: Positions,
        *,
        shards_at: Callable[[int], Sequence[int]],
        num_steps: int,
        device: torch.device,
    ) -> None:
        self._reader = reader
        self._positions = positions
        self._shards_at = shards_at
        self._num_steps = num_steps
        self._device = device
        self._read: deque[tuple[Ticket, Any]] = deque()

    def read(self, ticket: Ticket) -> list[Any]:
        """The batch, from what is read already or read now; several shards are views of one collated batch.

        Raises:
            DataError: a sample of this very ticket cannot be read or collated.
        """
        if not self._read or self._read[0][0] != ticket:
            with Untouched(seed=0):
                self._read = self._burst(ticket)
        _, batch = self._read.popleft()
        if isinstance(batch, DataError):
            raise batch
        if self._device.type != "cpu":
            batch = to_device(batch, self._device)
        return [batch] if len(ticket.shards) == 1 else shards_of(batch, self._positions.sizes(ticket))

    def close(self) -> None:
        """Nothing runs."""
        self._read.clear()

    def _burst(self, first: Ticket) -> deque[tuple[Ticket, Any]]:
        """The batch of a ticket, and of those after it while that is quick; one that fails is kept for its turn."""
        started = perf_counter()
        batch = self._attempt(first)
        read = deque([(first, batch)])
        most = min(_BURST, _BURST_BYTES // (_bytes_of(batch) + 1))
        for ticket in islice(self._after(first), max(most - 1, 0)):
            if isinstance(batch, DataError) or perf_counter() - started > _BURST_S:
                break
            batch = self._attempt(ticket)
            read.append((ticket, batch))
        return read

    def _attempt(self, ticket: Ticket) -> Any:
        indices = self._positions.indices(ticket).tolist()
        try:
            return self._reader.batch(self._positions.epoch(ticket), indices)
        except DataError as error:
            return error

    def _after(self, first: Ticket) -> Iterator[Ticket]:
        """The tickets that will be asked for next."""
        for step in range(first.step + 1, self._num_steps):
            shards = tuple(self._shards_at(step))
            if shards:
                yield Ticket(step, shards)


def _bytes_of(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
