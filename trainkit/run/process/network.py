"""Find the address and network interface that reach the other hosts of a launch."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import Final

from trainkit.cluster.address import is_loopback
from trainkit.cluster.launch import LaunchEnvironment

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
