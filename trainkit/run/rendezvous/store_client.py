"""The store of a launch as one process uses it: opened or found, read and written, and never waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final, TypeVar

from trainkit.bounded_json import parse_json
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import LinkError
from trainkit.run.rendezvous.network import reachable
from trainkit.run.rendezvous.store import store_of_launch
from trainkit.run.rendezvous.wait import WaitReporter
from trainkit.time_limits import Pending, call_within

__all__ = ["StoreClient"]

T = TypeVar("T")

_POLL_S: Final = 0.2
_ANSWER_S: Final = 300.0
"""How long the store may take to answer; its process may be stopped, or the machine loaded."""
_PROBE_S: Final = 2.0
"""How old the last proof may be that the store can be reached."""


class StoreClient:
    """Keys and values that every process of a launch sees.

    `TCPStore` waits without limit for an answer, also over a cable that was cut: it is looked first whether somebody is
    there. What goes wrong is a RuntimeError, as torch's own errors of the store are.
    """

    def __init__(self, launch: LaunchEnvironment) -> None:
        self._launch = launch
        self.address = launch.store
        """Host and port."""
        self._probed = 0.0
        self._store: Any = None

    def open(self, stack: ExitStack, patience: WaitReporter) -> None:
        """Open the store, if that is for this process to do, or wait until it is there.

        Args:
            stack: keeps the store open.
            patience: how long to wait, and what to say.

        Raises:
            ConfigError: the address is no address of this host, or in use.
            HangError: nobody answers there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - torch takes 1 s

        if self._launch.hosts_store:
            hosted = stack.enter_context(store_of_launch(self._launch))
            hosted.open()
            self.address = hosted.address
        while not reachable(*self.address):
            patience.wait(_POLL_S)
        connecting = Pending(
            lambda: TCPStore(
                *self.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S)
            )
        )
        while not connecting.wait(_POLL_S):  # a process that listens and never answers would be waited for, for ever
            patience.wait(0)
        self._store = connecting.result()

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

    def invalidate(self) -> None:
        """Look at the next question whether the store can be reached, however new the last proof is."""
        self._probed = 0.0

    def has(self, key: str) -> bool:
        """Whether a key was set."""
        self._check_reachable()
        return bool(self._ask(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes:
        """The value of a key that was set."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value

    def message(self, key: str) -> Any:
        """Return the JSON that was set under a key.

        Raises:
            LinkError: it is none: a process that is none of this launch has written there.
        """
        try:
            return parse_json(self.get(key))
        except ValueError as error:
            raise self.misfit(key, error) from None

    def misfit(self, key: str, error: ValueError) -> LinkError:
        """Return the error of a key that holds no message of this launch."""
        host, port = self.address
        return LinkError(f"the store at {host}:{port} holds no message of this launch under {key}: {error}")

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns what it is then."""
        self._check_reachable()
        return int(self._ask(lambda: self._store.add(key, amount)))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return call_within(question, _ANSWER_S)
        except TimeoutError:
            raise RuntimeError("the store of the launch does not answer") from None

    def _check_reachable(self) -> None:
        if not self._launch.hosts_store and time.monotonic() - self._probed > _PROBE_S:
            if not reachable(*self.address):
                raise RuntimeError("the store of the launch cannot be reached")
            self._probed = time.monotonic()
