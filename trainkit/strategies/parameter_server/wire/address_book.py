"""The address book of a run's tasks: addresses in the rendezvous store, under the prefix of the attempt."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

import torch.distributed as dist

from trainkit.cluster.tasks import Identity
from trainkit.errors import LinkError
from trainkit.strategies.parameter_server.wire.auth import AuthenticatedListener
from trainkit.strategies.rendezvous_store import store_client

_OVER = "over"
_MAX_PORT = 65535


class AddressBook:
    """Publishes addresses and finds them."""

    def __init__(self, store: Any, *, token: bytes, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._store, self.token, self.timeout_s, self.host = store, token, timeout_s, host

    @classmethod
    def of(cls, identity: Identity, timeout_s: float) -> Self:
        """Create the address book of a task's own run.

        Raises:
            LinkError: the task was started without others.
        """
        if identity.store is None:
            raise LinkError(f"{identity.task}: there is no rendezvous store (TRAINKIT_STORE)")
        store = store_client(identity.store, timeout_s)
        prefixed = dist.PrefixStore(f"{identity.prefix}/tasks", store)  # type: ignore[attr-defined]
        return cls(prefixed, token=identity.token.encode(), timeout_s=timeout_s, host=identity.host)

    def listener(self, name: str) -> AuthenticatedListener:
        """Create a listener that accepts only tasks of this run."""
        return AuthenticatedListener(name, token=self.token, host=self.host, timeout_s=self.timeout_s)

    def publish(self, name: str, address: tuple[str, int]) -> None:
        """Publish the address of a task."""
        self._store.set(name, f"{address[0]}:{address[1]}")

    def find(self, name: str) -> tuple[str, int]:
        """Return the address of a task; waits until it is published.

        Raises:
            LinkError: it was not published in time.
        """
        try:
            text = self._store.get(name).decode(errors="replace")
        except RuntimeError as error:
            raise LinkError(f"{name} has not published its address within {self.timeout_s:g} s") from error
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port[:6]) > _MAX_PORT:
            raise LinkError(f"the store holds no address of {name}")
        return host, int(port)

    def end(self) -> None:
        """Publish that the training is over, so that tasks that start later end at once."""
        with suppress(RuntimeError):  # the store may have ended
            self._store.set(_OVER, "")

    @property
    def is_over(self) -> bool:
        """Whether the training is over."""
        found: bool = self._store.check([_OVER])
        return found
