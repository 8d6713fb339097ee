"""Batches that worker processes read ahead, in the order of their requests."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.data.hooks import Reading
from trainkit.data.reading.reader import Reader
from trainkit.errors import DataError
from trainkit.numerics.batch import Request

_PR_SET_PDEATHSIG: Final = 1

_T = TypeVar("_T")


def read_by_workers(reader: Reader, reading: Reading, requests: Iterable[Request]) -> Generator[Any]:
    """Yield the result of `Reader.read` for each request, on the host; the workers end with the generator.

    Raises:
        DataError: a sample cannot be read, or a batch cannot be sent.
        OSError, RuntimeError: no memory is left to send a batch, or a worker has ended.
    """
    settings = reading.settings
    ahead: Any = iter(
        DataLoader(
            _Remote(reader),
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
    )
    workers = getattr(ahead, "_workers", ())
    try:
        for batch in ahead:
            if isinstance(batch, _Failure):
                raise batch.error
            yield batch
    except RuntimeError as error:
        ended = [f"pid {one.pid} {_ending(one.exitcode)}" for one in workers if one.exitcode is not None]
        if not ended:
            raise
        raise RuntimeError(
            f"a process that reads samples (loader.num_workers) has ended: {', '.join(ended)}"
        ) from error
    finally:
        # Waiting for garbage collection would leave processes running while anything refers to the iterator.
        ahead._shutdown_workers()  # noqa: SLF001
        for worker in workers:
            worker.kill()  # one that is stopped by a signal takes no SIGTERM, and Python would wait for it at its exit
            worker.join()


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


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "by SIGKILL, as Linux ends processes if memory runs out: a lower loader.num_workers needs less"
    return f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"


def _as_it_is(batch: _T) -> _T:
    return batch


def _enter_worker(_worker: int) -> None:
    """Set up a worker: leave Ctrl-C to its parent, end on SIGTERM, send every error, and do not outlive the parent."""
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]  # noqa: SLF001
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
