"""Show the runs below a folder in a browser of this machine: only on 127.0.0.1, read only, with a token.

    /?token=TOKEN         the page
    /events?token=TOKEN   server-sent events: a `Watched` document after each change

Any page in a browser may connect to 127.0.0.1, even by a foreign name that resolves to it: a request without the token,
or with another `Host`, is answered with 403.
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

LOOPBACK: Final = "127.0.0.1"
_REFRESH_S: Final = 2.0
_MOST_CONNECTIONS: Final = 32
_LONGEST_PATH: Final = 1024


class WatchServer(ThreadingHTTPServer):
    """Serves the runs of a board.

    Args:
        read: returns the current state of every run.
        port: the port; 0 selects a free one.
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
        """Address of the page, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def text(self) -> str:
        """Return the document as one line of JSON; all connections share one reading."""
        with self._lock:
            if time.monotonic() - self._read_at >= self.refresh_s:
                self._text, self._read_at = json.dumps(self._read()), time.monotonic()
            return self._text

    def is_own_host(self, host: str) -> bool:
        """Return whether the host of a request is this server, not a foreign name that resolves to this machine."""
        return host in {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def is_token(self, text: str) -> bool:
        """Return whether a text is the token, in constant time for its length."""
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
        """Print nothing: a browser may close connections at any time."""


class _Handler(BaseHTTPRequestHandler):
    """Answers only GET, by HTTP/1.0: the end of an answer is the end of its connection."""

    server: WatchServer
    timeout = 10.0
    """Seconds that a client may take to send its request, or to receive a piece of the answer."""
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
        """Print nothing: a line would contain the token."""


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


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trainkit watch</title>
<style nonce="NONCE">
:root { color-scheme: light dark; --line: #8884; --quiet: #666; --ground: #fff; --ink: #000; }
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; --ground: #14171a; --ink: #e8eaed; } }
html { background: var(--ground); color: var(--ink); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem; }
h1 { font-size: 1.15rem; overflow-wrap: anywhere; }
p { color: var(--quiet); }
div { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { overflow-wrap: anywhere; unicode-bidi: isolate; }
</style>
</head>
<body>
<main>
<h1 id="root">Runs</h1>
<p id="state" role="status">Connecting.</p>
<div tabindex="0" role="region" aria-labelledby="root">
<table>
<thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Step</th><th scope="col">Left</th>
<th scope="col">Samples a second</th><th scope="col">Metrics</th></tr></thead>
<tbody id="runs"></tbody>
</table>
</div>
</main>
<script nonce="NONCE">
"use strict";
const number = (value) => value === null ? "" : Number(value.toPrecision(4)).toLocaleString("en");
const span = (seconds) => {
  if (seconds === null) return "";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(s / 60), hours = Math.floor(s / 3600);
  return (hours ? hours + ":" + two(minutes % 60) : minutes) + ":" + two(s % 60);
};
const events = new EventSource("events" + location.search);
events.onmessage = (event) => {
  const found = JSON.parse(event.data);
  document.getElementById("root").textContent = "Runs in " + found.root;
  document.getElementById("runs").replaceChildren(...found.runs.map((run) => {
    const row = document.createElement("tr");
    const step = run.step === null ? "" : run.step.toLocaleString("en");
    const of = run.last_step === null ? "" : " of " + run.last_step.toLocaleString("en");
    const metrics = Object.entries(run.metrics).map(([name, value]) => name + " " + number(value)).join(", ");
    const state = run.note ? run.state + " (" + run.note + ")" : run.state;
    for (const text of [run.folder, state, step + of, span(run.remaining_s), number(run.samples_per_s), metrics])
      row.appendChild(document.createElement("td")).textContent = text;
    return row;
  }));
  const more = found.not_shown ? ", and " + found.not_shown + " older ones" : "";
  const number_of = found.runs.length + (found.runs.length === 1 ? " run" : " runs");
  document.getElementById("state").textContent = number_of + more + ".";
};
events.onerror = () => { document.getElementById("state").textContent = "No connection to trainkit watch."; };
</script>
</body>
</html>
"""


def page(nonce: str) -> str:
    """Return the page; its script and style carry a nonce, and no other script runs."""
    return _PAGE.replace("NONCE", nonce)
