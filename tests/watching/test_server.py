"""The page of `trainkit watch --serve`: this machine alone, nothing without the token, and nothing can be written."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from trainkit.watching.documents import Watched
from trainkit.watching.server import WatchServer, serving

FOUND: Watched = {"version": 1, "root": "</script><script>alert(1)</script>", "runs": [], "not_shown": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[WatchServer]:
    with serving(lambda: FOUND, refresh_s=0.01) as found:
        yield found


def answer(
    server: WatchServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        found = connection.getresponse()
        return found.status, dict(found.getheaders()), b"" if "event-stream" in str(found.headers) else found.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path", ["/", "/events", "/?token=", "/?token=wrong", "/events?token=%00", "/secret", "/?x=1&x=2&x=3"]
)
def test_without_the_token_everything_is_forbidden(server: WatchServer, path: str) -> None:
    assert answer(server, path)[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_name_that_leads_here_is_forbidden(server: WatchServer, host: str) -> None:
    assert answer(server, f"/?token={server.token}", host=host)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_nothing_can_be_written(server: WatchServer, method: str) -> None:
    assert answer(server, f"/?token={server.token}", method=method)[0] == 501


def test_the_page_runs_its_own_script_alone(server: WatchServer) -> None:
    status, headers, body = answer(server, f"/?token={server.token}")
    nonce = headers["Content-Security-Policy"].partition("script-src 'nonce-")[2].partition("'")[0]
    assert status == 200
    assert f'<script nonce="{nonce}">'.encode() in body
    assert b"innerHTML" not in body
    assert server.token.encode() not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_events_are_the_document_and_then_signs_of_life(server: WatchServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", f"/events?token={server.token}")
    stream = connection.getresponse()
    lines = [stream.readline() for _ in range(3)]
    connection.close()
    assert json.loads(lines[0].removeprefix(b"data: ")) == FOUND
    assert lines[2] == b": nothing new\n"


def test_it_listens_on_the_loopback_interface_alone(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.slow
def test_connections_beyond_the_limit_are_closed(server: WatchServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.server_port), timeout=60) for _ in range(32)]
    try:
        late = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
        with late:
            assert late.recv(1) == b""
    finally:
        for one in silent:
            one.close()
    assert threading.active_count() < 64


def test_two_servers_have_two_tokens(server: WatchServer) -> None:
    with serving(lambda: FOUND) as other:
        assert other.token != server.token
        assert len(other.token) >= 32
