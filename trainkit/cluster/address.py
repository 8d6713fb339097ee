"""HOST:PORT addresses, as users and launchers write them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import re
import socket
import struct
from typing import Final, NamedTuple

_SIOCGIFADDR: Final = 0x8915  # a Linux constant without a name in Python
_UNREACHED: Final = "192.0.2.1"
"""An address of the range for documentation (RFC 5737): no packet is sent to it."""

_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 12_000


class Address(NamedTuple):
    """Host and port.

    Example:
        >>> Address.parse("[::1]:2222"), str(Address("::1", 2222))
        (Address(host='::1', port=2222), '[::1]:2222')
    """

    host: str
    """A name, an IPv4 address, or an IPv6 address without brackets."""
    port: int
    """From 1 to 65535."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT; an IPv6 address is written in brackets.

        Raises:
            ValueError: the text is not an address; the message is the rule that it breaks.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"has no {'host' if colon else 'port'}. It must be HOST:PORT, as in 10.0.0.1:2222.")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("must be HOST:PORT; an IPv6 address needs brackets, as in [::1]:2222.")
        if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ValueError("its port must be a number from 1 to 65535.")
        bare = host.removeprefix("[").removesuffix("]")
        if (host != bare and not _is_ipv6(bare)) or (host == bare and not _HOST.fullmatch(bare)):
            raise ValueError("its host must be a name, an IPv4 address, or an IPv6 address in brackets.")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def canonical(self) -> Address:
        """The normalized form: two tasks with equal normalized addresses would use the same port.

        Example:
            >>> Address("LocalHost", 1).canonical == Address("127.0.0.1", 1)
            True
        """
        host = self.host.lower()
        if host == "localhost":
            host = "127.0.0.1"
        return Address(str(ipaddress.IPv6Address(host)) if _is_ipv6(host) else host, self.port)


def is_loopback(host: str) -> bool:
    """Return whether a host name means the machine itself on every machine.

    Example:
        >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("node7")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def derived_port(name: str) -> int:
    """Return a port for a launch whose launcher names none: the same on every rank, different for another launch.

    It is from 20000 to 31999, below the ports that Linux assigns to outgoing connections (32768 and up).

    Example:
        >>> derived_port("slurm 4711.0"), derived_port("slurm 4711.1")
        (24569, 20317)
    """
    digest = hashlib.sha256(name.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def own_address(towards: str = _UNREACHED) -> str | None:
    """Return the address that this host has in the network that reaches another; None if there is no route to it.

    A connected datagram socket looks up the route and sends nothing.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
            return address
    return None


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
