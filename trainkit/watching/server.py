"""Show the runs below a folder in a browser of this machine: 127.0.0.1 alone, read only, with a token.

    /?token=TOKEN         the page
    /events?token=TOKEN   server-sent events: a `Watched` document whenever something has changed

Any page that a browser has open may connect to 127.0.0.1, also under a name of its own that leads there: a request
without the token, or with another `Host`, is answered with 403.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from trainkit.watching.documents import Watched
from trainkit.watching.page import page

LOOPBACK: Final = "127.0.0.1"
_REFRESH_S: Final = 2.0
_MOST_CONNECTIONS: Final = 32
_LONGEST_PATH: Final = 1024


class WatchServer(ThreadingHTTPServer):
    """Serves the runs of a board.

    Args:
        read: returns what every run does at the moment.
        port: the port; 0 takes a free one.
        refresh_s: seconds between two readings.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, read: Callable[[], Watched], *, port: int = 0, refresh_s: float = _REFRESH_S) -> None:
        self.token: Final = secrets.token_urlsafe(24)
        self.refresh_s: Final = refresh_s
        self.ended: Final = threading.Event()
        self._read, self._lock = read, threading.Lock()
        self._text, self._read_at = "", -float("inf")
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def text(self) -> str:
        """Return the document as one line of JSON; all connections share one reading."""
        with self._lock:
            if time.monotonic() - self._read_at >= self.refresh_s:
                self._text, self._read_at = json.dumps(self._read()), time.monotonic()
            return self._text

    def is_own_host(self, host: str) -> bool:
        """Return whether a request names this server, and not another name that leads to this machine."""
        return host in {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def is_token(self, text: str) -> bool:
        """Return whether a text is the token; takes equally long for every text of its length."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Answer in a thread; beyond the limit of connections, close the new one."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a browser closes connections when it likes."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET alone, by HTTP/1.0: the end of an answer is the end of its connection."""

    server: WatchServer
    timeout = 10.0
    """Seconds that a client may take to send its request, or to take a piece of the answer."""
    server_version, sys_version = "trainkit", ""

    def do_GET(self) -> None:
        """Answer the page or the events."""
        parts = urlsplit(self.path[:_LONGEST_PATH])
        given = parse_qs(parts.query, max_num_fields=4).get("token", [""])[0] if len(self.path) < _LONGEST_PATH else ""
        if not (self.server.is_own_host(self.headers.get("Host", "")) and self.server.is_token(given)):
            self._answer(
                HTTPStatus.FORBIDDEN, "text/plain", b"403: the address that trainkit watch printed has a token\n"
            )
        elif parts.path == "/":
            nonce = secrets.token_urlsafe(16)
            self._answer(HTTPStatus.OK, "text/html", page(nonce).encode(), nonce=nonce)
        elif parts.path == "/events":
            self._events()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"404\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, *, nonce: str = "") -> None:
        self._head(status, kind, nonce=nonce)
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, *, nonce: str = "") -> None:
        self.send_response(status)
        own = f"; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'" if nonce else ""
        policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'{own}"
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self) -> None:
        self._head(HTTPStatus.OK, "text/event-stream")
        before = ""
        with suppress(OSError):
            while True:
                text = self.server.text()
                self.wfile.write(b": nothing new\n\n" if text == before else f"data: {text}\n\n".encode())
                before = text
                if self.server.ended.wait(self.server.refresh_s):
                    return

    def log_message(self, *_: Any) -> None:
        """Print nothing: a line would hold the token."""


@contextmanager
def serving(read: Callable[[], Watched], *, port: int = 0, refresh_s: float = _REFRESH_S) -> Iterator[WatchServer]:
    """Serve for the duration of the block.

    Raises:
        OSError: the port is taken.
    """
    with WatchServer(read, port=port, refresh_s=refresh_s) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="watch")
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
