"""Connections between the tasks of a run: how they find, authenticate and talk to each other.

A frame is a kind, a small JSON map, and named vectors of numbers, which are read into and sent from the memory of
tensors. Received data is never unpickled, and a peer cannot cause large allocations: a frame's text is bounded, and its
numbers are read up to the limit of the reader, or the connection is closed.

Two tasks authenticate each other by the run's token, which is never sent: each end sends a nonce, and answers the
other's with an HMAC under the token, over both nonces, its own role and the client's name. The server answers first, so
that a client sends no proof to an unrelated process that listens on the port of a dead server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from threading import BoundedSemaphore, Lock, Thread, current_thread
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.cluster.tasks import Identity
from trainkit.errors import LinkError
from trainkit.files import expect_map, parse_json, whole_numbers
from trainkit.strategies.base import JsonMap
from trainkit.strategies.rendezvous_store import store_client
from trainkit.strategies.tensors.staging import ByteLayout, TensorKind

_HEAD: Final = struct.Struct("!4sI")
_MAGIC: Final = b"tkl2"
_TEXT_BYTES: Final = 4 * 2**20
_UNAUTHENTICATED_BYTES: Final = 1024
"""Size limit of a frame's text from a peer that is not authenticated."""
_DEPTH: Final = 8
"""Depth limit of nested maps and lists in the text of a frame."""
_MAX_RANGES: Final = 64
"""Number of memory ranges that one system call transfers."""
_LONGEST_WAIT_S: Final = 1e6
"""The longest timeout of a socket."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""If a host vanishes, this is detected within 35 s, even without traffic."""
MAX_UNAUTHENTICATED: Final = 32
"""Limit of simultaneous connections that have not been authenticated."""
_HANDSHAKE_S: Final = 5.0
"""Time limit of the authentication."""
_RETRY_S: Final = 0.05
"""Seconds until another attempt to connect."""
_NAME_LENGTH: Final = 64
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""The dtypes that travel, by their names in a frame."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a frame.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame; the numbers that follow it are still to be read."""

    kind: str
    meta: JsonMap


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
        self._unread: dict[str, TensorKind] = {}
        self._sending = Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def mark_authenticated(self, peer: str) -> None:
        """Record that the peer is authenticated."""
        self.peer, self._until = peer, None

    def send(self, kind: str, meta: JsonMap | None = None, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a frame; returns when the system has accepted all of it.

        Args:
            kind: the kind of the frame.
            meta: a JSON map.
            tensors: contiguous tensors on the CPU; their numbers follow, without a copy.

        Raises:
            LinkError: the connection broke, or the peer accepts nothing for `timeout_s`.
        """
        tensors = tensors or {}
        described = [[name, dtype_name(tensor.dtype), tensor.numel()] for name, tensor in tensors.items()]
        text = json.dumps([kind, meta or {}, described], separators=(",", ":")).encode()
        if len(text) > _TEXT_BYTES:
            raise ValueError(f"{kind}: {len(text)} bytes of text, and a frame takes {_TEXT_BYTES}")
        head = memoryview(_HEAD.pack(_MAGIC, len(text)) + text)
        pending = deque([head, *(_memory_of(tensor) for tensor in tensors.values() if tensor.numel())])
        with self._sending:
            try:
                self._out.settimeout(self._timeout(self.timeout_s))
                while pending:
                    sent = self._out.sendmsg(list(islice(pending, _MAX_RANGES)))
                    self.sent_bytes += sent
                    _advance(pending, sent)
            except TimeoutError:
                raise LinkError(f"{self.peer} accepted no data for {self.timeout_s:g} s") from None
            except OSError as error:
                raise LinkError(f"{self.peer} is gone: {_describe(error)}") from error

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Wait for the next frame; its numbers must then be read by `tensors`.

        Args:
            timeout_s: seconds to wait for its begin; None: without limit.

        Raises:
            LinkError: the connection broke, the peer pauses, or it sends a malformed frame.
        """
        self.tensors(0)
        head = bytearray(_HEAD.size)
        self._fill([memoryview(head)], _LONGEST_WAIT_S if timeout_s is None else timeout_s)
        magic, length = _HEAD.unpack(head)
        if magic != _MAGIC or length > (_TEXT_BYTES if self._until is None else _UNAUTHENTICATED_BYTES):
            raise self._refusal("sent a malformed frame")
        text = bytearray(length)
        self._fill([memoryview(text)], self.timeout_s)
        try:
            kind, meta, described = parse_json(text, depth=_DEPTH)
            whole_numbers([numel for _, _, numel in described])
            self._unread = {name: TensorKind(torch.Size([size]), DTYPES[dtype]) for name, dtype, size in described}
            return Frame(str(kind), expect_map(meta, {}))
        except (ValueError, TypeError, KeyError, RuntimeError):
            raise self._refusal("sent a malformed frame") from None

    def tensors(self, most_bytes: int, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Read the numbers of the last received frame: contiguous tensors, flat except for those of `into`.

        Args:
            most_bytes: limit of all of them together.
            into: contiguous tensors on the CPU that take those of their names.

        Raises:
            LinkError: there are more numbers, they do not fit into a tensor, or the connection broke.
        """
        unread, self._unread = self._unread, {}
        if not unread:
            return {}
        size = sum(kind.nbytes for kind in unread.values())
        targets = {name: tensor for name, tensor in (into or {}).items() if name in unread}
        kinds = {name: TensorKind(torch.Size([tensor.numel()]), tensor.dtype) for name, tensor in targets.items()}
        if size > most_bytes or any(kind != unread[name] for name, kind in kinds.items()):
            raise self._refusal(f"sent {size} unexpected bytes")
        rest = {name: kind for name, kind in unread.items() if name not in targets}
        layout = ByteLayout(list(rest.values()))
        memory = torch.empty(layout.size, dtype=torch.uint8)
        vectors = {**targets, **dict(zip(rest, layout.views(memory), strict=True))}
        self._fill([_memory_of(vectors[name]) for name in unread if vectors[name].numel()], self.timeout_s)
        return vectors

    def close(self) -> None:
        """Close the connection, and interrupt threads that wait on it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._out.close()

    def _fill(self, views: Iterable[memoryview], wait_s: float) -> None:
        pending = deque(view for view in views if view.nbytes)
        try:
            while pending:
                self._connection.settimeout(self._timeout(wait_s))
                count = self._connection.recvmsg_into(list(islice(pending, _MAX_RANGES)))[0]
                if not count:
                    raise LinkError(f"{self.peer} closed the connection")
                self.received_bytes += count
                _advance(pending, count)
                wait_s = self.timeout_s
        except LinkError:
            raise
        except TimeoutError:
            raise LinkError(f"{self.peer} sent nothing for {wait_s:g} s") from None
        except OSError as error:
            raise LinkError(f"{self.peer} is gone: {_describe(error)}") from error

    def _timeout(self, wanted_s: float) -> float:
        return wanted_s if self._until is None else max(min(wanted_s, self._until - time.monotonic()), 1e-3)

    def _refusal(self, why: str) -> LinkError:
        """Close the connection and return the error of an invalid frame: nothing after it can be decoded."""
        self.close()
        return LinkError(f"{self.peer} {why}")


def _memory_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous(), "the numbers would be those of a copy"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _advance(pending: deque[memoryview], count: int) -> None:
    """Remove the transferred bytes."""
    while count:
        first = pending[0]
        if count < first.nbytes:
            pending[0] = first[count:]
            return
        count -= first.nbytes
        pending.popleft()


def _describe(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


class AuthenticatedListener:
    """Accepts connections of tasks that know the token, one thread each; all others are dropped.

    Args:
        timeout_s: seconds that a peer may pause within a frame.

    Example:
        >>> with AuthenticatedListener("ps:0", token=b"secret") as listener:
        ...     listener.serve(lambda link: link.send("hello", {"to": link.peer}))
        ...     link = connect(listener.address, token=b"secret", name="worker:1", peer="ps:0", timeout_s=5)
        ...     print(link.receive().meta)
        ...     link.close()
        {'to': 'worker:1'}
    """

    def __init__(self, name: str, *, token: bytes, host: str = "127.0.0.1", timeout_s: float = 30.0) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.settimeout(1.0)  # interval at which a thread in accept checks for the end
        address: tuple[str, int] = self._socket.getsockname()[:2]
        self.address = address
        self._unauthenticated = BoundedSemaphore(MAX_UNAUTHENTICATED)
        self._lock = Lock()
        self._links: set[Connection] = set()
        self._threads: set[Thread] = set()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, handle: Callable[[Connection], None]) -> None:
        """Start to accept connections; returns at once.

        Args:
            handle: called on a separate thread for each connection; when it returns, or raises LinkError, the
                connection is closed.
        """
        self._start(self._accept, handle)

    def close(self) -> None:
        """Close all connections and end their threads."""
        with self._lock:
            self._is_closed = True
            links, threads = list(self._links), list(self._threads)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in links:
            link.close()
        for thread in threads:
            if thread is not current_thread():
                thread.join()

    def _start(self, run: Callable[..., None], *args: object) -> bool:
        """Run a function on a thread of its own; return whether it runs: not after `close`."""
        thread = Thread(target=run, args=args, name=f"{self.name} {run.__name__}", daemon=True)
        with self._lock:
            if not self._is_closed:
                self._threads = {other for other in self._threads if other.is_alive()} | {thread}
                thread.start()
            return not self._is_closed

    def _accept(self, handle: Callable[[Connection], None]) -> None:
        while not self._is_closed:
            try:
                connection, where = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed; or no more files can be opened, which is temporary
                time.sleep(_RETRY_S)
                continue
            peer = f"{where[0]}:{where[1]}"
            may_begin = self._unauthenticated.acquire(blocking=False)
            if not (may_begin and self._start(self._serve_connection, connection, peer, handle)):
                connection.close()

    def _serve_connection(self, connection: socket.socket, where: str, handle: Callable[[Connection], None]) -> None:
        """Serve a connection from its beginning to its end."""
        link = None
        try:
            try:
                until = time.monotonic() + _HANDSHAKE_S
                link = Connection(connection, peer=where, timeout_s=self.timeout_s, until=until)
                with self._lock:
                    self._links.add(link)
                    if self._is_closed:
                        link.close()
                link.mark_authenticated(_client_of(link, self._token))
            except OSError:
                return
            finally:
                self._unauthenticated.release()
            with suppress(LinkError):
                handle(link)
        finally:
            (link or connection).close()
            with self._lock:
                self._links -= {link}


class _UnknownTokenError(LinkError):
    """The peer does not belong to this run."""


def connect(
    address: tuple[str, int],
    *,
    token: bytes,
    name: str,
    peer: str,
    timeout_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> Connection:
    """Connect to a listening task, retrying until it listens.

    Args:
        address: host and port.
        token: the token of the run.
        name: name of this task, sent to the peer.
        peer: name of the peer, for messages.
        timeout_s: seconds to retry, and seconds that the peer may later pause within a frame.
        is_over: returns whether the training has ended meanwhile, so that no server will listen again.

    Raises:
        LinkError: no server answered, the peer does not know the token, or the training is over.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _open_connection(address, token=token, name=name, peer=peer, timeout_s=timeout_s)
        except _UnknownTokenError:
            raise
        except OSError as error:  # it does not listen yet, is busy, or about to end
            reason = error.strerror or str(error)
        if is_over():
            raise LinkError(f"{peer} at {address[0]}:{address[1]} no longer listens: the training is over")
        if time.monotonic() + _RETRY_S > until:
            raise LinkError(f"{peer} at {address[0]}:{address[1]} cannot be reached: {timeout_s:g} s, {reason}")
        time.sleep(_RETRY_S)


def _open_connection(address: tuple[str, int], *, token: bytes, name: str, peer: str, timeout_s: float) -> Connection:
    connection = socket.create_connection(address, timeout=min(timeout_s, _HANDSHAKE_S))
    link = Connection(connection, peer=peer, timeout_s=timeout_s, until=time.monotonic() + _HANDSHAKE_S)
    try:
        client_nonce = secrets.token_hex(32)
        link.send("hello", {"name": name, "nonce": client_nonce})
        server_nonce, proof = _texts(link.receive(_HANDSHAKE_S), "challenge", "nonce", "proof")
        _refuse_other(link, proof, _proof(token, "server", name, client_nonce, server_nonce))
        link.send("proof", {"proof": _proof(token, "client", name, client_nonce, server_nonce)})
    except BaseException:
        link.close()
        raise
    link.mark_authenticated(peer)
    return link


def _client_of(link: Connection, token: bytes) -> str:
    """Authenticate as the server; return the name of the client."""
    name, client_nonce = _texts(link.receive(_HANDSHAKE_S), "hello", "name", "nonce")
    server_nonce = secrets.token_hex(32)
    link.send("challenge", {"nonce": server_nonce, "proof": _proof(token, "server", name, client_nonce, server_nonce)})
    [proof] = _texts(link.receive(_HANDSHAKE_S), "proof", "proof")
    _refuse_other(link, proof, _proof(token, "client", name, client_nonce, server_nonce))
    return name


def _texts(frame: Frame, kind: str, *keys: str) -> list[str]:
    """Return texts of a handshake message, which must be short and printable."""
    values = [value for key in keys if isinstance(value := frame.meta.get(key), str)]
    fits = all(len(value) <= _NAME_LENGTH and value.isascii() and value.isprintable() for value in values)
    if frame.kind != kind or len(values) < len(keys) or not fits:
        raise LinkError("malformed handshake message")
    return values


def _proof(token: bytes, role: str, name: str, client_nonce: str, server_nonce: str) -> str:
    """Return the proof that the sender knows the token."""
    message = f"{role}\n{name}\n{client_nonce}\n{server_nonce}".encode()
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def _refuse_other(link: Connection, proof: str, expected: str) -> None:
    if not hmac.compare_digest(proof, expected):
        raise _UnknownTokenError(f"{link.peer} does not know the token of this run")


class AddressBook:
    """Publishes the addresses of a run's tasks in the rendezvous store, under the prefix of the attempt.

    Raises:
        LinkError: the task was started without others.
    """

    def __init__(self, identity: Identity, timeout_s: float) -> None:
        if identity.store is None:
            raise LinkError(f"{identity.task}: there is no rendezvous store (TRAINKIT_STORE)")
        store: Any = store_client(identity.store, timeout_s)
        self._store = dist.PrefixStore(f"{identity.prefix}/tasks", store)  # type: ignore[attr-defined]
        self._token, self._host, self._timeout_s = identity.token.encode(), identity.host, timeout_s

    def listener(self, name: str) -> AuthenticatedListener:
        """Create a listener that accepts only tasks of this run."""
        return AuthenticatedListener(name, token=self._token, host=self._host, timeout_s=self._timeout_s)

    def publish(self, name: str, address: tuple[str, int]) -> None:
        """Publish the address of a task."""
        self._store.set(name, f"{address[0]}:{address[1]}")

    def connect(self, peer: str, *, name: str) -> Connection:
        """Connect to a task, once it has published its address; `name` is that of this task.

        Raises:
            LinkError: it was not published in time, or it cannot be reached.
        """
        try:
            text = self._store.get(peer).decode(errors="replace")
        except RuntimeError as error:
            raise LinkError(f"{peer} has not published its address within {self._timeout_s:g} s") from error
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port[:6]) > 2**16:
            raise LinkError(f"the store holds no address of {peer}")
        return connect(
            (host, int(port)),
            token=self._token,
            name=name,
            peer=peer,
            timeout_s=self._timeout_s,
            is_over=lambda: self.is_over,
        )

    def end(self) -> None:
        """Publish that the training is over, so that tasks that start later end at once."""
        with suppress(RuntimeError):  # the store may have ended
            self._store.set("over", "")

    @property
    def is_over(self) -> bool:
        """Whether the training is over."""
        return bool(self._store.check(["over"]))
