"""The store of a launch as one process uses it: opened or found, read and written, and never waited for in vain."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Final

from trainkit.cluster.launch import Launch
from trainkit.run.network import reachable
from trainkit.run.rendezvous import store_of_launch
from trainkit.run.waiting import Patience

__all__ = ["Board"]

_POLL_S: Final = 0.2
_PROBE_S: Final = 2.0
"""How old the last proof may be that the store can be reached."""


class Board:
    """Keys and values that every process of a launch sees.

    `TCPStore` waits without limit for an answer, also over a cable that was cut: it is looked first whether somebody is
    there. What goes wrong is a RuntimeError, as torch's own errors of the store are.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.address = launch.store
        """Host and port."""
        self._probed = 0.0
        self._store: Any = None

    def open(self, stack: ExitStack, patience: Patience) -> None:
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
        self._store = TCPStore(*self.address, is_master=False, wait_for_workers=False)

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

    def doubt(self) -> None:
        """Look at the next question whether the store can be reached, however new the last proof is."""
        self._probed = 0.0

    def has(self, key: str) -> bool:
        """Whether a key was set."""
        self._probe()
        return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """The value of a key that was set."""
        value: bytes = self._store.get(key)
        return value

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns what it is then."""
        self._probe()
        return int(self._store.add(key, amount))

    def _probe(self) -> None:
        if not self._launch.hosts_store and time.monotonic() - self._probed > _PROBE_S:
            if not reachable(*self.address):
                raise RuntimeError("the store of the launch cannot be reached")
            self._probed = time.monotonic()
