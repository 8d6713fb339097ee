"""The rendezvous store of the ranks: hosted by a process that outlives the workers, and its clients.

A client is created within a time limit. The constructor of TCPStore waits for ever if a process accepts its connection
and never answers; its timeout only limits connecting. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from trainkit.errors import LinkError

_START_S = 60.0
"""Seconds until the store must answer: its port is bound before torch is imported, which is slow on a loaded
machine.
"""


class Rendezvous(Protocol):
    """The interface of a store for the supervisor."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, known before the store answers: workers start while this process still imports torch."""

    def open(self) -> None:
        """Start to serve clients; called once, after the first workers were started."""


class HostedStore:
    """A `TCPStore` in this process that listens on one address only, by default on the loopback interface.

    TCPStore itself listens on every interface, even for 127.0.0.1, and authenticates no client: it gets a socket that
    is already bound.

    Raises:
        LinkError: the host does not reach this address, as in a container without a loopback interface.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        try:  # torch would try for 300 s, and no signal ends it
            socket.create_connection(self.address, timeout=_START_S).close()
        except OSError as error:
            self._socket.close()
            remedy = " Turn on its loopback interface: ip link set lo up." if address[0] == "127.0.0.1" else ""
            raise LinkError(
                f"this host does not reach its own address {address[0]}: {error.strerror}.{remedy}"
            ) from None
        self._store: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store = None
        self._socket.close()

    def open(self) -> None:
        """Start to serve; imports torch. Clients that connected before wait in the socket's queue."""
        if self._store is not None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - 1 s, beside the workers'

        host, port = self.address
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach(), use_libuv=True
        )


def store_client(address: tuple[str, int], timeout_s: float) -> Any:
    """Connect to a store that must answer in `timeout_s`, which is also the time limit of the client for a key.

    Raises:
        LinkError: no process listens there, or one that does not answer.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - see above

    host, port = address
    try:  # its host listens before it starts a client, but torch would try a store that is gone until the timeout
        with contextlib.suppress(TimeoutError):
            socket.create_connection(address, timeout=1).close()
    except OSError as error:
        raise LinkError(f"no store listens at {host}:{port}: {error.strerror or error}") from None
    timeout, limit_s = timedelta(seconds=timeout_s), max(timeout_s, _START_S)
    try:
        return call_within(lambda: TCPStore(host, port, is_master=False, timeout=timeout), limit_s)
    except TimeoutError:
        reason = f"the store at {host}:{port} accepts connections and does not answer"
        raise LinkError(f"{reason}: {limit_s:g} s") from None


T = TypeVar("T")


class Pending(Generic[T]):
    """A call that runs in a separate thread.

    The thread of a call that never returns ends with the process.

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
        """Wait for the end of the call, for at most the given time; return whether it has ended."""
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
