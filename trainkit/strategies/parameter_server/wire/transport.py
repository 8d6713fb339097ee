"""Connections between tasks: frames of a kind, a small JSON text, and raw numbers read into and sent from tensors.

Received data is never unpickled, and a peer cannot cause large allocations: a frame's text is bounded, and its numbers
are read into tensors that the reader has allocated for the expected message, or the connection is closed.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Final

import torch
from torch import Tensor

from trainkit.bounded import expect_map, parse_json
from trainkit.errors import LinkError
from trainkit.strategies.base import JsonMap

_HEAD: Final = struct.Struct("!4s16sIQ")
_MAGIC: Final = b"tkl1"
_META_BYTES: Final = 64 * 1024
_UNAUTHENTICATED_BYTES: Final = 1024
"""Size limit of a frame's text from a peer that is not authenticated."""
_META_DEPTH: Final = 8
"""Depth limit of nested maps and lists in the text of a frame."""
_MAX_RANGES: Final = 64
"""Number of memory ranges that one system call transfers."""
_LONGEST_WAIT_S: Final = 1e6
"""The longest timeout of a socket."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""If a host vanishes, this is detected within 35 s, even without traffic."""


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; those of a copy if it is not contiguous.

    Example:
        >>> memory_of(torch.ones(3, dtype=torch.bfloat16)).nbytes
        6
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame; the numbers that follow it are still to be read."""

    kind: str
    meta: JsonMap = field(default_factory=dict)
    num_bytes: int = 0
    """Size of the numbers."""


class Connection:
    """One end of a connection. One thread at a time receives; any thread may send.

    Args:
        timeout_s: seconds that the other end may pause within a frame.
        until: on the clock of time.monotonic: deadline for the authentication of the peer; None: it is authenticated.
    """

    def __init__(self, connection: socket.socket, *, peer: str, timeout_s: float, until: float | None = None) -> None:
        self.peer, self.timeout_s = peer, timeout_s
        self.sent_bytes = self.received_bytes = 0
        self._connection, self._until = connection, until
        self._out = connection.dup()  # a duplicate with its own timeout: one thread may send while another waits
        self._unread = 0
        self._sending = Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def mark_authenticated(self, peer: str) -> None:
        """Record that the peer is authenticated."""
        self.peer, self._until = peer, None

    def send(self, kind: str, meta: JsonMap | None = None, tensors: Iterable[Tensor] = ()) -> None:
        """Send a frame; returns when the system has accepted all of it.

        Args:
            kind: up to 16 ASCII letters.
            meta: up to 64 KiB of JSON.
            tensors: tensors on the CPU; their numbers follow, without a copy if they are contiguous.

        Raises:
            LinkError: the connection broke, or the peer accepts nothing for `timeout_s`.
        """
        text = json.dumps(meta or {}, separators=(",", ":")).encode()
        if len(text) > _META_BYTES:
            raise ValueError(f"{kind}: {len(text)} bytes of text, and a frame takes {_META_BYTES}")
        views = [memory_of(tensor) for tensor in tensors if tensor.numel()]
        head = _HEAD.pack(_MAGIC, kind.encode(), len(text), sum(view.nbytes for view in views))
        with self._sending:
            self._send([memoryview(head + text), *views])

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Wait for the next frame; its numbers must then be read by `read`.

        Args:
            timeout_s: seconds to wait for its begin; None: without limit.

        Raises:
            LinkError: the connection broke, the peer pauses, or it sends a malformed frame.
        """
        if self._unread:
            raise self._refusal(f"sent {self._unread} unexpected bytes")
        head = bytearray(_HEAD.size)
        self._fill([memoryview(head)], _LONGEST_WAIT_S if timeout_s is None else timeout_s)
        magic, kind, length, num_bytes = _HEAD.unpack(head)
        if magic != _MAGIC or length > (_META_BYTES if self._until is None else _UNAUTHENTICATED_BYTES):
            raise self._refusal("sent a malformed frame")
        text = bytearray(length)
        self._fill([memoryview(text)], self.timeout_s)
        self._unread = num_bytes
        return Frame(self._decoded(kind), self._parsed(text), num_bytes)

    def read(self, into: Sequence[Tensor]) -> None:
        """Read the numbers of the last received frame.

        Args:
            into: contiguous tensors on the CPU that they fill exactly.

        Raises:
            LinkError: there are more or fewer numbers, or the connection broke.
        """
        assert all(tensor.is_contiguous() for tensor in into), "the numbers would go into copies"
        self.read_memory([memory_of(tensor) for tensor in into if tensor.numel()])

    def read_memory(self, views: Sequence[memoryview]) -> None:
        """Read the numbers of the last received frame into memory ranges."""
        wanted = sum(view.nbytes for view in views)
        if wanted != self._unread:
            raise self._refusal(f"sent {self._unread} bytes where {wanted} were expected")
        self._fill(views, self.timeout_s)
        self._unread = 0

    def close(self) -> None:
        """Close the connection, and interrupt threads that wait on it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._out.close()

    def _send(self, views: Sequence[memoryview]) -> None:
        left = deque(views)
        try:
            self._out.settimeout(self._timeout(self.timeout_s))
            while left:
                sent = _send_some(self._out, list(islice(left, _MAX_RANGES)))
                self.sent_bytes += sent
                _advance(left, sent)
        except TimeoutError:
            raise LinkError(f"{self.peer} accepted no data for {self.timeout_s:g} s") from None
        except OSError as error:
            raise LinkError(f"{self.peer} is gone: {_describe(error)}") from error

    def _fill(self, views: Iterable[memoryview], wait_s: float) -> None:
        left = deque(view for view in views if view.nbytes)
        try:
            while left:
                self._connection.settimeout(self._timeout(wait_s))
                count = _receive_some(self._connection, list(islice(left, _MAX_RANGES)))
                if not count:
                    raise LinkError(f"{self.peer} closed the connection")
                self.received_bytes += count
                _advance(left, count)
                wait_s = self.timeout_s
        except LinkError:
            raise
        except TimeoutError:
            raise LinkError(f"{self.peer} sent nothing for {wait_s:g} s") from None
        except OSError as error:
            raise LinkError(f"{self.peer} is gone: {_describe(error)}") from error

    def _timeout(self, wanted_s: float) -> float:
        return wanted_s if self._until is None else max(min(wanted_s, self._until - time.monotonic()), 1e-3)

    def _decoded(self, kind: bytes) -> str:
        name = kind.rstrip(b"\0")
        if not name.isalpha():  # on bytes: ASCII letters only
            raise self._refusal("sent a malformed frame")
        return name.decode("ascii")

    def _parsed(self, text: bytearray) -> JsonMap:
        try:
            return expect_map(parse_json(text, depth=_META_DEPTH), {})
        except ValueError:
            raise self._refusal("sent a malformed frame") from None

    def _refusal(self, why: str) -> LinkError:
        """Close the connection and return the error of an invalid frame: nothing after it can be decoded."""
        self.close()
        return LinkError(f"{self.peer} {why}")


def _send_some(connection: socket.socket, views: list[memoryview]) -> int:
    return connection.sendmsg(views) if hasattr(connection, "sendmsg") else connection.send(views[0])


def _receive_some(connection: socket.socket, views: list[memoryview]) -> int:
    if len(views) == 1 or not hasattr(connection, "recvmsg_into"):
        return connection.recv_into(views[0])
    return connection.recvmsg_into(views)[0]


def _advance(left: deque[memoryview], count: int) -> None:
    """Remove the transferred bytes."""
    while count:
        first = left[0]
        if count < first.nbytes:
            left[0] = first[count:]
            return
        count -= first.nbytes
        left.popleft()


def _describe(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
