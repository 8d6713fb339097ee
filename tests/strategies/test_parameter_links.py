"""A malformed frame or half a push that changes the variables of a server is caught here alone.

Connections between tasks: who may, what arrives, and what becomes of garbage.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.strategies.test_parameter_store import Net, equal, gradients, optimizer_of
from tests.support.serving import TOKEN, serving
from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.parameter_server.wire.auth import AuthenticatedListener, connect
from trainkit.strategies.parameter_server.wire.transport import Connection

HEAD = struct.Struct("!4s16sIQ")


@pytest.fixture
def ends() -> Iterator[list[Connection]]:
    """Two links that talk to each other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, second = socket.create_connection(server.getsockname()), server.accept()[0]
    links = [Connection(first, peer="b", timeout_s=0.3), Connection(second, peer="a", timeout_s=0.3)]
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize(("wait", "said"), [
    (lambda link: link.read([torch.zeros(2)]), "a sent 16 bytes where 8 were expected"),
    (lambda link: link.receive(), "a sent 16 unexpected bytes"),
])  # fmt: skip
def test_numbers_that_nobody_waits_for_end_the_connection(ends: list[Connection], wait: Any, said: str) -> None:
    ends[0].send("push", {}, [torch.zeros(4)])
    ends[1].receive()
    with pytest.raises(LinkError, match=said):
        wait(ends[1])
    with pytest.raises(LinkError, match="b closed the connection"):
        ends[0].receive()


def test_a_peer_that_stops_in_the_middle_is_given_up(ends: list[Connection]) -> None:
    ends[0]._connection.sendall(HEAD.pack(b"tkl1", b"pull", 100, 0) + b"{")
    with pytest.raises(LinkError, match=r"a sent nothing for 0\.3 s"):
        ends[1].receive()


def test_sending_leaves_the_patience_of_who_waits_alone(ends: list[Connection]) -> None:
    patience = ends[0]._connection.gettimeout()
    ends[0].send("order")
    assert ends[0]._connection.gettimeout() == patience
    assert ends[1].receive().kind == "order"


def test_who_pulls_when_the_run_ends_finds_the_connection_closed() -> None:
    with serving(Net(), optimizer_of("sgd"), loads=False) as farm:
        worker = farm.client()
        worker.links[0].send("pull", {"have": "1", "dtype": "float32", "version": 0})
    with pytest.raises(LinkError, match=r"ps:0 (closed the connection|is gone)"):
        worker.answer(0, "pulled")
    worker.close()


def test_a_client_with_another_token_gets_an_error_and_is_counted_as_rejected() -> None:
    with AuthenticatedListener("ps:0", token=b"one") as listener:
        listener.serve(lambda link: None)
        with pytest.raises(LinkError, match="ps:0 does not know the token of this run"):
            connect(listener.address, token=b"two", name="worker:1", peer="ps:0", timeout_s=3)
        for _ in range(100):
            if listener.rejected:
                break
            time.sleep(0.01)
        assert listener.rejected == 1


def test_an_unreachable_peer_is_waited_for_while_the_training_lasts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    to = {"token": TOKEN, "name": "worker:1", "peer": "ps:1"}
    with pytest.raises(LinkError, match=rf"ps:1 at 127\.0\.0\.1:{address[1]} cannot be reached: 0\.2 s, .*refused"):
        connect(address, timeout_s=0.2, **to)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="no longer listens: the training is over"):
        connect(address, timeout_s=600, is_over=lambda: True, **to)  # type: ignore[arg-type]


HELLO = json.dumps({"name": "worker:1", "nonce": "0" * 64}).encode()
GARBAGE = [
    random.Random(5).randbytes(199),
    HEAD.pack(b"tkl1", b"hello", 2**32 - 1, 2**64 - 1),
    HEAD.pack(b"tkl1", b"hello", 60_000, 0) + b"[" * 60_000,
    HEAD.pack(b"tkl1", b"push", len(HELLO), 2**40) + HELLO,
    HEAD.pack(b"tkl1", b"hello", len(HELLO), 0) + HELLO + HEAD.pack(b"tkl1", b"proof", 2, 0) + b"{}",
    HEAD.pack(b"tkl1", b"\xff" * 16, 2, 0) + b"{}",
]
"""Half frames, frames of too much, frames of nothing known, noise."""


def test_malformed_frames_of_strangers_do_no_harm() -> None:
    model = Net()
    with serving(model, optimizer_of("adamw")) as farm:
        worker, before = farm.client(), farm.chief.state()
        for sent in GARBAGE * 5:
            with socket.create_connection(farm.addresses[0]) as connection, suppress(OSError):  # dropped
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
        equal(farm.chief.state(), before)
        worker.push("a", gradients(model, 1))
        farm.chief.apply(version=1, lr_factor=1.0, keys=["a"])
        worker.close()


HALF = {"have": "1", "dtype": "float32"}
BAD: list[tuple[str, dict[str, Any], list[torch.Tensor]]] = [
    ("push", {"keys": ["a"], "have": "f" * 60_000, "dtype": "float32"}, []),
    ("push", {"keys": ["a"], "have": "1", "dtype": "object"}, []),
    ("push", {"keys": ["a"], **HALF}, [torch.zeros(3)]),
    ("push", {"keys": ["a"], **HALF, "rows": {"0": 10**9}}, []),
    ("push", {"keys": ["a"], **HALF, "rows": {"0": 1}}, [torch.tensor([-1], dtype=torch.int32), torch.ones(37)]),
    ("push", {"keys": "a" * 200, **HALF}, []),
    ("rows", {"piece": 0, "count": 1, "dtype": "float32"}, [torch.tensor([101])]),
    ("rows", {"piece": 99, "count": 1, "dtype": "float32"}, []),
    ("pull", {**HALF, "version": "x"}, []),
    ("load", {"key": "param/large.weight", "shape": [2**40], "dtype": "float32"}, []),
]


def test_an_invalid_request_of_an_authenticated_peer_is_refused_or_ends_its_connection() -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        before = farm.chief.state()
        for kind, meta, tensors in BAD:
            worker = farm.client()
            worker.links[0].send(kind, meta, tensors)
            with suppress(LinkError):
                assert worker.links[0].receive(5).kind == "refused", (kind, meta)
            worker.close()
        equal(farm.chief.state(), before)


def test_a_worker_that_dies_in_the_middle_of_a_push_leaves_nothing() -> None:
    text = json.dumps({"keys": ["a"], "have": "1", "dtype": "float32"}).encode()
    with serving(Net(), optimizer_of("sgd")) as farm:
        before, worker = farm.chief.state(), farm.client()
        worker.links[0]._connection.sendall(HEAD.pack(b"tkl1", b"push", len(text), 4 * 37 * 101) + text + bytes(99))
        worker.close()
        with pytest.raises(TrainingError, match="ps:0 refuses: there is no gradient a"):
            farm.chief.apply(version=1, lr_factor=1.0, keys=["a"])
        equal(farm.chief.state(), before)
