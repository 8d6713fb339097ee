"""Limit the time of a call that has no timeout of its own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A call that runs in a separate thread.

    A call that never returns keeps its thread, which ends with the process.

    Args:
        call: a function without arguments.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._over = call, Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        Thread(target=self._run, name="call with a time limit", daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        finally:
            self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call, at most for the given time; return whether it has ended."""
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """Return the result of a call that has ended, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._results[0]


def call_within(call: Callable[[], T], timeout_s: float) -> T:
    """Run a call with a time limit; return its result.

    Raises:
        TimeoutError: the call has not ended in time.

    Example:
        >>> call_within(lambda: 3, timeout_s=1)
        3
    """
    pending = Pending(call)
    if not pending.wait(timeout_s):
        raise TimeoutError(f"{timeout_s:g} s")
    return pending.result()
