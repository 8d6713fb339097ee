"""Where the ranks of a run meet: a key-value store of the supervisor, so that it outlives its workers."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["HostedStore", "Rendezvous"]


class Rendezvous(Protocol):
    """What the supervisor needs of a store."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, known before it answers: workers start while this process still imports torch."""

    def open(self) -> None:
        """Begin to answer; called once, after the first workers were started."""


class HostedStore:
    """A `TCPStore` in this process that listens on the loopback interface only.

    TCPStore itself listens on every interface, even for 127.0.0.1, and asks nobody who they are: it is handed a socket
    that is bound already.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._socket = socket.create_server(address, backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._store: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store = None
        self._socket.close()

    def open(self) -> None:
        """Begin to answer; imports torch. Who connected before waits in the socket's queue."""
        if self._store is not None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - 1 s, beside the workers'

        host, port = self.address
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach(), use_libuv=True
        )
