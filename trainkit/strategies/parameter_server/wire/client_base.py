"""A task's connections to all servers: establish them, send requests in parallel, and close them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Self, TypeVar

import torch

from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.parameter_server.wire.auth import connect
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards

T = TypeVar("T")
_MORE_S = 10.0
"""A server reports a timeout itself, before its silence would count as one."""


class ServerConnections:
    """Connections to the servers of a run. One thread at a time uses it.

    Args:
        transfer: the dtype of transferred gradients and parameters; None: their own dtype.
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
        """Connect to all servers.

        Args:
            addresses: one per server, in their order.
            shares: the partition of the variables; servers refuse another one.
            token: the run's.
            name: of this task: `chief` for the only one whose orders they execute.
            timeout_s: how long to retry, and how long an answer may take.
            transfer: the dtype of transferred gradients and parameters; None: their own dtype.
            is_over: returns whether the training has ended meanwhile.

        Raises:
            LinkError: a server cannot be reached.
            TrainingError: a server holds another model.
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
        """Close the connections."""
        for link in self.links:
            link.close()
        if self._threads is not None:
            self._threads.shutdown()

    def answer(self, server: int, *kinds: str) -> Frame:
        """Receive the answer of a server to a request.

        Raises:
            TrainingError: the server rejects the request; the error contains its reason.
            LinkError: the connection broke, or the answer is of another kind.
        """
        frame = self.links[server].receive(self._timeout_s + _MORE_S)
        if frame.kind == "refused":
            raise TrainingError(f"ps:{server} refuses: {frame.meta.get('why')}")
        if frame.kind not in kinds:
            raise LinkError(f"ps:{server} says {frame.kind}, and {' or '.join(kinds)} was expected")
        return frame

    def each(self, request: Callable[[int], T], servers: Sequence[int] | None = None) -> list[T]:
        """Run a request on several servers in parallel, by default on all; return when all have answered.

        Raises:
            LinkError, TrainingError: of the first that fails, after all have answered.
        """
        chosen = range(len(self.links)) if servers is None else servers
        if self._threads is None or len(chosen) < 2:
            return [request(server) for server in chosen]
        futures = [self._threads.submit(request, server) for server in chosen]
        wait(futures)
        return [one.result() for one in futures]
