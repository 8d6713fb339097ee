"""Batches of a map-style dataset, read in this process between the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, Final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.data.reading.collate import MoveBatch
from trainkit.data.reading.reader import Reader
from trainkit.errors import DataError
from trainkit.numerics.batch import Positions, Ticket
from trainkit.numerics.generators import Untouched

_BURST: Final = 16
"""Most batches read at a time."""
_BURST_BYTES: Final = 1 << 20
"""Most bytes of these batches together."""
_BURST_S: Final = 2e-3
"""Longest time that a step waits for batches of later steps."""


class InProcessReader:
    """Reads samples in this process, several batches at a time if they are small and fast to read.

    Reading and stepping evict each other's data from the processor's caches: with a batch read before each step of a
    small model, both took about a sixth longer than separately. Reading a burst of batches every few steps pays this
    cost once per burst. Batches that are large, or slow to read, are read one at a time.
    """

    def __init__(
        self,
        reader: Reader,
        positions: Positions,
        *,
        shards_at: Callable[[int], Sequence[int]],
        num_steps: int,
        move: MoveBatch,
    ) -> None:
        self._reader = reader
        self._positions = positions
        self._shards_at = shards_at
        self._num_steps = num_steps
        self._move = move
        self._read: deque[tuple[Ticket, Any]] = deque()

    def read(self, ticket: Ticket) -> list[Any]:
        """Return the batch, prefetched or read now; several shards are views of one collated batch.

        Raises:
            DataError: a sample of this ticket cannot be read or collated.
        """
        if not self._read or self._read[0][0] != ticket:
            with Untouched(seed=0):
                self._read = self._burst(ticket)
        _, batch = self._read.popleft()
        if isinstance(batch, DataError):
            raise batch
        return self._reader.cut(self._move(batch), self._positions.sizes(ticket))

    def close(self) -> None:
        """Drop the prefetched batches."""
        self._read.clear()

    def _burst(self, first: Ticket) -> deque[tuple[Ticket, Any]]:
        """Read the batch of a ticket, and later ones as long as reading is fast; an error is kept for the ticket that
        caused it.
        """
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
        try:
            return self._reader.read(*self._positions.request(ticket))
        except DataError as error:
            return error

    def _after(self, first: Ticket) -> Iterator[Ticket]:
        """Yield the tickets that follow."""
        for step in range(first.step + 1, self._num_steps):
            shards = tuple(self._shards_at(step))
            if shards:
                yield Ticket(step, shards)


def _bytes_of(batch: Any) -> int:
    # `nbytes` fails for sparse tensors.
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
