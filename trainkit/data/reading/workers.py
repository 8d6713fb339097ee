"""Batches prefetched by worker processes, in the order in which they will be used."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.data.hooks import Reading
from trainkit.data.reading.collate import MoveBatch
from trainkit.data.reading.reader import Reader
from trainkit.errors import DataError
from trainkit.numerics.batch import Positions, Request, Ticket
from trainkit.numerics.generators import Untouched

_PR_SET_PDEATHSIG: Final = 1

_T = TypeVar("_T")


class Workers:
    """Random access by step over torch's DataLoader: it starts at the first ticket's step, at no cost.

    It prefetches the shards of this rank. A ticket out of order (another step) restarts the workers from there; a
    ticket with other shards than planned, or that of the last step once more, is read in this process, and the workers
    continue.
    """

    def __init__(
        self,
        dataset: Any,
        positions: Positions,
        reading: Reading,
        *,
        shards_at: Callable[[int], Sequence[int]],
        num_steps: int,
        move: MoveBatch,
    ) -> None:
        self._dataset, self._positions, self._reading = dataset, positions, reading
        self._shards_at = shards_at
        self._num_steps = num_steps
        self._move = move
        self._ahead: Iterator[Any] | None = None
        self._results: Iterator[Any] = iter(())
        self._next_step = self._last_step = -1
        self._reader = Reader(dataset, seed=reading.seed, collate=reading.hooks.collate)

    def read(self, ticket: Ticket) -> list[Any]:
        """Return the next batch of the workers, or one read in this process."""
        if ticket.shards != tuple(self._shards_at(ticket.step)) or ticket.step == self._last_step:
            with Untouched(seed=0):
                batch = self._reader.read(*self._positions.request(ticket))
        else:
            if self._ahead is None or ticket.step != self._next_step:
                self._start(ticket.step)
            batch = next(self._results)
            self._next_step = self._after(ticket.step)
        self._last_step = ticket.step
        return self._reader.cut(self._move(batch), self._positions.sizes(ticket))

    def close(self) -> None:
        """Stop the workers and wait for them."""
        shut_down(self._ahead)
        self._ahead = None

    def _start(self, step: int) -> None:
        self.close()
        self._ahead = read_ahead(self._dataset, _Requests(self._requests, step), self._reading)
        self._results = results(self._ahead)

    def _requests(self, first_step: int) -> Iterator[Request]:
        # Use separate positions: the workers run ahead of the training, which must keep its cached block of positions.
        positions = Positions(self._positions.plan, self._positions.order)
        for step in range(first_step, self._num_steps):
            ticket = Ticket(step, tuple(self._shards_at(step)))
            if ticket.shards:
                yield positions.request(ticket)

    def _after(self, step: int) -> int:
        """Return the next step that has shards for this rank."""
        following = range(step + 1, self._num_steps)
        return next((later for later in following if self._shards_at(later)), self._num_steps)


def read_ahead(dataset: Any, requests: Iterable[Request], reading: Reading) -> Iterator[Any]:
    """Start workers on a series of requests; each item is the result of `Reader.read` on the host, or an error."""
    settings = reading.settings
    loader = DataLoader(
        _Remote(Reader(dataset, seed=reading.seed, collate=reading.hooks.collate)),
        batch_size=None,
        sampler=requests,
        num_workers=settings.num_processes,
        prefetch_factor=settings.prefetch,
        collate_fn=_as_it_is,
        pin_memory=reading.device.type == "cuda" if settings.pin_memory == "auto" else settings.pin_memory,
        worker_init_fn=_enter_worker,
        # a separate generator: nothing may draw from the global one
        generator=torch.Generator(),
    )
    return iter(loader)


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the parent process."""

    error: Exception


class _Remote(Dataset[Any]):
    """The dataset and its reader in a worker process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._reader.read(*request)
        except DataError as error:
            return _Failure(error)


def _send_failure(queue: Queue[Any], error: Exception, item: Any) -> None:
    """Send an error in the place of a batch that cannot be sent.

    It is called in the thread of a queue that sends. By default it only prints the error, and the reader of the batch
    would wait for ever.
    """
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int)):  # a queue of the user's own
        traceback.print_exception(error)
        return
    if not isinstance(error, OSError | MemoryError) and "shared memory" not in str(error):
        advice = (
            "Change what the batch holds (a tensor that requires gradients: detach() it), or use loader.num_workers=0."
        )
        error = DataError(f"a worker process cannot send its batch: {type(error).__name__}: {error}. {advice}")
    queue.put((item[0], _Failure(error)))


class _Requests:
    def __init__(self, requests: Callable[[int], Iterator[Request]], first_step: int) -> None:
        self._requests = requests
        self._first_step = first_step

    def __iter__(self) -> Iterator[Request]:
        return self._requests(self._first_step)


def results(ahead: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of an iterator of `read_ahead`.

    Raises:
        DataError: a sample cannot be read, or a batch cannot be sent.
        OSError, RuntimeError: no memory is left to send a batch, or a worker has ended.
    """
    while True:
        try:
            batch = next(ahead)
        except StopIteration:
            return
        except RuntimeError as error:
            workers = getattr(ahead, "_workers", ())
            ended = [f"pid {one.pid} {_ending(one.exitcode)}" for one in workers if one.exitcode is not None]
            if not ended:
                raise
            raise RuntimeError(
                f"a process that reads samples (loader.num_workers) has ended: {', '.join(ended)}"
            ) from error
        if isinstance(batch, _Failure):
            raise batch.error
        yield batch


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "by SIGKILL, as Linux ends processes if memory runs out: a lower loader.num_workers needs less"
    return f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"


def _as_it_is(batch: _T) -> _T:
    return batch


def shut_down(iterator: Iterator[Any] | None) -> None:
    """Stop the workers of an iterator of `read_ahead` and wait for them."""
    # Waiting for garbage collection would leave processes running while anything refers to the iterator.
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()
        for worker in getattr(iterator, "_workers", ()):
            worker.kill()  # one that is stopped by a signal takes no SIGTERM, and Python would wait for it at its exit
            worker.join()


def _enter_worker(_worker: int) -> None:
    """Set up a worker: leave Ctrl-C to its parent, end on SIGTERM, send every error, and do not outlive the parent."""
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # noqa: SLF001
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
