"""A task's connections to all servers: how they come about, are asked at once, and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Self, TypeVar

import torch

from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.parameter_server.wire.auth import connect
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards

__all__ = ["ServerConnections"]

T = TypeVar("T")
_MORE_S = 10.0
"""A server says itself that something does not come, before its silence would."""


class ServerConnections:
    """The servers of a run, connected. One thread at a time uses it.

    Args:
        links: a connection a server, in their order.
        shares: the cut of the variables.
        transfer: what gradients and parameters travel in; None: in their own dtype.
        timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        links: Sequence[Connection],
        shares: VariableShards,
        *,
        transfer: torch.dtype | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.links, self.shares, self.transfer = list(links), shares, transfer
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(len(links), thread_name_prefix="servers") if len(links) > 1 else None

    @classmethod
    def connect(
        cls,
        addresses: Sequence[tuple[str, int]],
        shares: VariableShards,
        *,
        token: bytes,
        name: str,
        timeout_s: float = 60.0,
        transfer: torch.dtype | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Connect to all of them.

        Args:
            addresses: one a server, in their order.
            shares: the cut of the variables; the servers refuse another.
            token: the run's.
            name: of this task: `chief` for the only one whose orders they follow.
            timeout_s: how long to try, and how long an answer may take.
            transfer: what gradients and parameters travel in; None: in their own dtype.
            is_over: whether the training has ended meanwhile.

        Raises:
            LinkError: one cannot be reached.
            TrainingError: one holds another model.
        """
        links: list[Connection] = []
        try:
            for index, address in enumerate(addresses):
                peer = f"ps:{index}"
                link = connect(address, token=token, name=name, peer=peer, timeout_s=timeout_s, is_over=is_over)
                links.append(link)
            found = cls(links, shares, transfer=transfer, timeout_s=timeout_s)
            for server, link in enumerate(links):
                link.send("layout", {"digest": shares.digest})
                found.answer(server, "layout")
        except BaseException:
            for link in links:
                link.close()
            raise
        return found

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent to each server."""
        return {server: link.sent_bytes for server, link in enumerate(self.links)}

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received from each server."""
        return {server: link.received_bytes for server, link in enumerate(self.links)}

    def close(self) -> None:
        """End the connections."""
        for link in self.links:
            link.close()
        if self._threads is not None:
            self._threads.shutdown()

    def answer(self, server: int, *kinds: str) -> Frame:
        """What a server says to a request.

        Args:
            server: which one.
            kinds: of frames that are expected.

        Raises:
            TrainingError: it cannot do what was asked, and says why.
            LinkError: it is gone, or says something else.
        """
        frame = self.links[server].receive(self._timeout_s + _MORE_S)
        if frame.kind == "refused":
            raise TrainingError(f"ps:{server} refuses: {frame.meta.get('why')}")
        if frame.kind not in kinds:
            raise LinkError(f"ps:{server} says {frame.kind}, and {' or '.join(kinds)} was expected")
        return frame

    def each(self, ask: Callable[[int], T], servers: Sequence[int] | None = None) -> list[T]:
        """Ask several servers at once, all where none are named; returns when all have answered.

        Raises:
            LinkError, TrainingError: of the first that fails; the others are waited for.
        """
        chosen = range(len(self.links)) if servers is None else servers
        if self._threads is None or len(chosen) < 2:
            return [ask(server) for server in chosen]
        asked = [self._threads.submit(ask, server) for server in chosen]
        wait(asked)
        return [one.result() for one in asked]
