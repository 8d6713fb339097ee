"""The rendezvous store of the ranks of a run: the supervisor hosts it, so that it outlives the workers."""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Any, Protocol, Self

from trainkit.cluster.address import Address, is_loopback
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import ConfigError, Problem
from trainkit.run.process.network import own_address


class Rendezvous(Protocol):
    """The interface of a store for the supervisor."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, known before the store answers: workers start while this process still imports torch."""

    def open(self) -> None:
        """Start to serve; called once, after the first workers were started."""


class HostedStore:
    """A `TCPStore` in this process that listens on one address only, by default on the loopback interface.

    TCPStore itself listens on every interface, even for 127.0.0.1, and authenticates no client: it is given a socket
    that is already bound.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=128)
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
        """Start to serve; imports torch. Clients that connected before wait in the socket's queue."""
        if self._store is not None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - 1 s, beside the workers'

        host, port = self.address
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach(), use_libuv=True
        )


def store_of_launch(launch: LaunchEnvironment) -> HostedStore:
    """Create the store that rank 0 hosts if the launcher hosts none: it listens at the launch's address only.

    If this host resolves its own name to the loopback interface (Debian gives 127.0.1.1), other hosts could not
    connect: then the address of the outgoing interface is used.

    Raises:
        ConfigError: the address is no address of this host, or in use.
    """
    host, port = launch.store
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        found = str(address[0])
        if launch.num_hosts > 1 and is_loopback(found) and not is_loopback(host):
            found = own_address() or found
        return HostedStore((found, port))
    except OSError as error:
        number = error.errno or 0  # resolver errors are negative, and have their own texts
        rule = f"rank 0 cannot listen there: {os.strerror(number) if number > 0 else error.strerror or error}."
        raise ConfigError([Problem(key="store", value=str(Address(host, port)), rule=rule)]) from error
