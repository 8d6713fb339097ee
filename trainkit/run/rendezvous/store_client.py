"""The client of a launch's store: it opens or finds the store, reads and writes it, and never blocks without limit."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final, TypeVar

from trainkit.cluster.address import Address, is_loopback, own_address
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import ConfigError, HangError, LinkError, Problem
from trainkit.files import parse_json
from trainkit.strategies.rendezvous_store import HostedStore, Pending
from trainkit.trainer.ownership import print_notice

_FIRST_S: Final = 3.0
_LONGEST_S: Final = 60.0


class WaitReporter:
    """Sleeps in short intervals and logs the missing ranks: after 3 s, then at intervals that double up to 60 s."""

    def __init__(
        self,
        missing: Callable[[], str],
        *,
        timeout_s: float,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._missing, self._timeout_s, self._log = missing, timeout_s, log or print_notice
        self._clock, self._sleep = clock, sleep
        self._begun = clock()
        self._interval_s = min(_FIRST_S, timeout_s / 2)
        self._next_line_s = self._interval_s

    def wait(self, moment_s: float) -> None:
        """Sleep for a moment.

        Raises:
            HangError: the timeout has passed.
        """
        waited = self._clock() - self._begun
        if waited >= self._timeout_s:
            raise HangError(f"waited {self._timeout_s:g} s (supervisor.join_timeout_s) for {self._missing()}.")
        if waited >= self._next_line_s:
            self._log(f"waiting for {self._missing()}" + (f", {waited:.0f} s" if waited > _FIRST_S * 1.5 else ""))
            self._interval_s = min(self._interval_s * 2, _LONGEST_S)
            self._next_line_s = waited + self._interval_s
        self._sleep(moment_s)


T = TypeVar("T")

_POLL_S: Final = 0.2
_ANSWER_S: Final = 300.0
"""Seconds that the store may take to answer; its process may be stopped, or the machine loaded."""
_ANSWER_AFTER_FAILURE_S: Final = 5.0
"""The same once a rank has failed: it may be the one that hosts the store."""
_CHECK_VALID_S: Final = 2.0
"""Seconds for which a successful connection check is valid."""


class StoreClient:
    """Keys and values that every process of a launch sees.

    `TCPStore` waits without limit for an answer, even if the network is down: each operation first checks that the
    server accepts connections. Failures are RuntimeErrors, like torch's own errors of the store.
    """

    def __init__(self, launch: LaunchEnvironment) -> None:
        self._launch = launch
        self.address = launch.store
        """Host and port of the store."""
        self._checked_at = 0.0
        self._answer_s = _ANSWER_S
        self._unanswered: Pending[Any] | None = None
        self._store: Any = None

    def open(self, stack: ExitStack, waiter: WaitReporter) -> None:
        """Host the store, if this process does so, or wait until it is reachable.

        Raises:
            ConfigError: the address does not belong to this host, or is in use.
            HangError: no server answers there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - torch takes 1 s

        if self._launch.hosts_store:
            hosted = stack.enter_context(store_of_launch(self._launch))
            hosted.open()
            self.address = hosted.address
        while not reachable(*self.address):
            waiter.wait(_POLL_S)
        connecting = Pending(
            lambda: TCPStore(
                *self.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S)
            )
        )
        while not connecting.wait(_POLL_S):  # a server that listens but never answers would block for ever
            waiter.wait(0)
        self._store = connecting.result()

    def close(self) -> None:
        """Drop the connection to the store."""
        self._store = None

    def invalidate(self) -> None:
        """Check before the next operation whether the store can be reached, and wait less for it from now on."""
        self._checked_at, self._answer_s = 0.0, _ANSWER_AFTER_FAILURE_S

    def has(self, key: str) -> bool:
        """Return whether a key was set."""
        self._check_reachable()
        return bool(self._call(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes:
        """Return the value of a key that was set."""
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def message(self, key: str) -> Any:
        """Return the JSON value of a key.

        Raises:
            LinkError: it is not JSON: a process of another launch has written it.
        """
        try:
            return parse_json(self.get(key))
        except ValueError as error:
            raise self.misfit(key, error) from None

    def misfit(self, key: str, error: ValueError) -> LinkError:
        """Return the error for a key that holds no message of this launch."""
        host, port = self.address
        return LinkError(f"the store at {host}:{port} holds no message of this launch under {key}: {error}")

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""
        self._check_reachable()
        return int(self._call(lambda: self._store.add(key, amount)))

    def _call(self, operation: Callable[[], T]) -> T:
        if self._unanswered is None or self._unanswered.wait(0):  # its connection serves one operation after the other
            pending = Pending(operation)
            if pending.wait(min(self._answer_s, _ANSWER_S)):
                return pending.result()
            self._unanswered = pending
        raise RuntimeError("the store of the launch does not answer")

    def _check_reachable(self) -> None:
        if not self._launch.hosts_store and time.monotonic() - self._checked_at > _CHECK_VALID_S:
            if not reachable(*self.address):
                raise RuntimeError("the store of the launch cannot be reached")
            self._checked_at = time.monotonic()


def reachable(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether a server answers at an address."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def store_of_launch(launch: LaunchEnvironment) -> HostedStore:
    """Create the store that rank 0 hosts if the launcher hosts none: it listens at the launch's address only.

    If this host resolves its own name to the loopback interface (Debian gives 127.0.1.1), other hosts could not
    connect: then the address of the outgoing interface is used.

    Raises:
        ConfigError: the address does not belong to this host, or is in use.
    """
    host, port = launch.store
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        found = str(address[0])
        if launch.num_hosts > 1 and is_loopback(found) and not is_loopback(host):
            found = own_address() or found
        return HostedStore((found, port))
    except OSError as error:
        number = error.errno or 0  # resolver errors are negative, and have their own messages
        rule = f"rank 0 cannot listen there: {os.strerror(number) if number > 0 else error.strerror or error}."
        raise ConfigError([Problem(key="store", value=str(Address(host, port)), rule=rule)]) from error
