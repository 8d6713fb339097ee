"""Two hosts in one machine: network namespaces with an address each, joined by a cable that can be cut."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str
    cable: str

    def command(self, *arguments: str) -> list[str]:
        """A command as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def unplug(self) -> None:
        """Cut the cable: no packet comes through any more, and nobody is told."""
        ip("-netns", self.name, "link", "set", self.cable, "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; skips where this machine cannot make them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2: apt-get install iproute2")
    number = os.getpid() % 10_000
    hosts = [Host(f"tk{number}{side}", f"10.77.0.{octet}", f"tk{number}{side}") for octet, side in ((1, "a"), (2, "b"))]
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                stack.callback(ip, "netns", "delete", host.name)
            ip("link", "add", hosts[0].cable, "type", "veth", "peer", "name", hosts[1].cable)
            for host in hosts:
                ip("link", "set", host.cable, "netns", host.name)
                ip("-netns", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
                ip("-netns", host.name, "link", "set", "lo", "up")
                ip("-netns", host.name, "link", "set", host.cable, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield hosts[0], hosts[1]
