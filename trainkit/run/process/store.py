"""The rendezvous store of the ranks, which the supervisor hosts so that it outlives the workers, and its network."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from types import TracebackType
from typing import Any, Final, Protocol, Self

from trainkit.cluster.address import Address, is_loopback
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import ConfigError, Problem

if sys.platform != "win32":
    import fcntl

_SIOCGIFADDR: Final = 0x8915  # a Linux constant without a name in Python
_UNREACHED: Final = "192.0.2.1"
"""An address of the range for documentation (RFC 5737): no packet is sent to it."""


def reachable(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether a server answers at an address."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def own_address(towards: str = _UNREACHED) -> str | None:
    """Return the address that this host has in the network that reaches another; None if there is no route to it.

    A connected datagram socket looks up the route and sends nothing.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
            return found
    return None


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if none has, and on other systems than Linux."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def socket_environ(launch: LaunchEnvironment) -> dict[str, str]:
    """Return the environment for gloo: loopback on one host, else the interface that reaches the store."""
    if sys.platform == "win32":
        return {}
    if launch.num_hosts == 1 or is_loopback(launch.store[0]):
        name: str | None = "lo0" if sys.platform == "darwin" else "lo"
    else:
        own = own_address(launch.store[0])
        if own is not None and is_loopback(own):  # the store is here, under a name that resolves to this host
            own = own_address()
        name = None if own is None else interface_of(own)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


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
