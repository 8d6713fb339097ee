"""Mutual authentication of two tasks by the run's token, which is never sent.

Each end sends a nonce; each answers the other's with an HMAC under the token, over both nonces, its own role and the
client's name. The server answers first, so that a client sends no proof to an unrelated process that listens on the
port of a dead server.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock, Thread, current_thread
from typing import Final, Self

from trainkit.errors import LinkError
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame

MAX_UNAUTHENTICATED: Final = 32
"""Limit of simultaneous connections that have not been authenticated."""
_HANDSHAKE_S: Final = 5.0
"""Time limit of the authentication."""
_RETRY_S: Final = 0.05
"""Seconds until another attempt to connect."""
_NAME_LENGTH: Final = 64


class AuthenticatedListener:
    """Accepts connections of tasks that know the token, one thread each; all others are dropped.

    Args:
        port: 0: any free port.
        timeout_s: seconds that a peer may pause within a frame.

    Example:
        >>> with AuthenticatedListener("ps:0", token=b"secret") as listener:
        ...     listener.serve(lambda link: link.send("hello", {"to": link.peer}))
        ...     link = connect(listener.address, token=b"secret", name="worker:1", peer="ps:0", timeout_s=5)
        ...     print(link.receive().meta)
        ...     link.close()
        {'to': 'worker:1'}
    """

    def __init__(
        self, name: str, *, token: bytes, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.rejected = 0
        """Number of connections that were dropped before their peer was authenticated."""
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
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
        thread = Thread(target=self._run, args=(run, *args), name=f"{self.name} {run.__name__}", daemon=True)
        with self._lock:
            if self._is_closed:
                return False
            self._threads.add(thread)
            thread.start()
        return True

    def _run(self, run: Callable[..., None], *args: object) -> None:
        try:
            run(*args)
        finally:
            with self._lock:
                self._threads.discard(current_thread())

    def _accept(self, handle: Callable[[Connection], None]) -> None:
        while not self._is_closed:
            try:
                connection, where = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed; or no more files can be opened, which is temporary
                time.sleep(_RETRY_S)
                continue
            if not self._unauthenticated.acquire(blocking=False):
                self.rejected += 1
                connection.close()
            elif not self._start(self._serve_connection, connection, f"{where[0]}:{where[1]}", handle):
                self._unauthenticated.release()
                connection.close()

    def _serve_connection(self, connection: socket.socket, where: str, handle: Callable[[Connection], None]) -> None:
        """Serve a connection from its beginning to its end."""
        try:
            link = Connection(connection, peer=where, timeout_s=self.timeout_s, until=time.monotonic() + _HANDSHAKE_S)
        except OSError:  # closed already
            self._unauthenticated.release()
            connection.close()
            return
        with self._open(link), suppress(LinkError):
            try:
                link.mark_authenticated(_server_handshake(link, self._token))
            except LinkError:
                self.rejected += 1
                return
            finally:
                self._unauthenticated.release()
            handle(link)

    @contextmanager
    def _open(self, link: Connection) -> Iterator[None]:
        with self._lock:
            self._links.add(link)
            if self._is_closed:
                link.close()
        try:
            yield
        finally:
            link.close()
            with self._lock:
                self._links.discard(link)


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
            return _connected(address, token=token, name=name, peer=peer, timeout_s=timeout_s)
        except LinkError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
        except _RejectedError as error:
            reason = str(error)
        if is_over():
            raise LinkError(f"{peer} at {address[0]}:{address[1]} no longer listens: the training is over")
        if time.monotonic() + _RETRY_S > until:
            raise LinkError(f"{peer} at {address[0]}:{address[1]} cannot be reached: {timeout_s:g} s, {reason}")
        time.sleep(_RETRY_S)


class _RejectedError(Exception):
    """The peer closed the connection before its authentication: it is busy, or about to end."""


def _connected(address: tuple[str, int], *, token: bytes, name: str, peer: str, timeout_s: float) -> Connection:
    connection = socket.create_connection(address, timeout=min(timeout_s, _HANDSHAKE_S))
    link = Connection(connection, peer=peer, timeout_s=timeout_s, until=time.monotonic() + _HANDSHAKE_S)
    try:
        _client_handshake(link, token, name)
    except BaseException:
        link.close()
        raise
    link.mark_authenticated(peer)
    return link


def _client_handshake(link: Connection, token: bytes, name: str) -> None:
    """Authenticate as the client."""
    own = secrets.token_hex(32)
    try:
        link.send("hello", {"name": name, "nonce": own})
        answer = link.receive(_HANDSHAKE_S)
    except LinkError as error:
        raise _RejectedError(str(error)) from error
    other = _text(answer, "challenge", "nonce")
    if not hmac.compare_digest(_text(answer, "challenge", "proof"), _proof(token, "server", name, own, other)):
        raise LinkError(f"{link.peer} does not know the token of this run")
    link.send("proof", {"proof": _proof(token, "client", name, own, other)})
    _text(link.receive(_HANDSHAKE_S), "welcome", "name")


def _server_handshake(link: Connection, token: bytes) -> str:
    """Authenticate as the server; return the name of the client."""
    hello, own = link.receive(_HANDSHAKE_S), secrets.token_hex(32)
    name, other = _text(hello, "hello", "name"), _text(hello, "hello", "nonce")
    link.send("challenge", {"nonce": own, "proof": _proof(token, "server", name, other, own)})
    proof = _text(link.receive(_HANDSHAKE_S), "proof", "proof")
    if not hmac.compare_digest(proof, _proof(token, "client", name, other, own)):
        raise LinkError(f"{link.peer} does not know the token of this run")
    link.send("welcome", {"name": name})
    return name


def _text(frame: Frame, kind: str, key: str) -> str:
    """Return a text of a handshake message, which must be short and printable."""
    value = frame.meta.get(key)
    if frame.kind != kind or frame.num_bytes or not isinstance(value, str):
        raise LinkError("malformed handshake message")
    if len(value) > _NAME_LENGTH or not (value.isascii() and value.isprintable()):
        raise LinkError("malformed handshake message")
    return value


def _proof(token: bytes, role: str, name: str, client_nonce: str, server_nonce: str) -> str:
    """Return the proof that the sender knows the token."""
    message = f"{role}\n{name}\n{client_nonce}\n{server_nonce}".encode()
    return hmac.new(token, message, hashlib.sha256).hexdigest()
