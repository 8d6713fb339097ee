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
from trainkit.strategies.updates.links import AuthenticatedListener, Connection, connect

HEAD = struct.Struct("!4sI")


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
    (lambda link: link.tensors(15), "a sent 16 unexpected bytes"),
    (lambda link: link.tensors(99, {"grad": torch.zeros(2)}), "a sent 16 unexpected bytes"),
    (lambda link: link.receive(), "a sent 16 unexpected bytes"),
])  # fmt: skip
def test_numbers_that_nobody_waits_for_end_the_connection(ends: list[Connection], wait: Any, said: str) -> None:
    ends[0].send("push", {}, {"grad": torch.zeros(4)})
    ends[1].receive()
    with pytest.raises(LinkError, match=said):
        wait(ends[1])
    with pytest.raises(LinkError, match="b closed the connection"):
        ends[0].receive()


def test_a_peer_that_stops_in_the_middle_is_given_up(ends: list[Connection]) -> None:
    ends[0]._connection.sendall(HEAD.pack(b"tkl2", 100) + b"{")
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
        worker.links[0].send("pull", {"skip": [], "dtype": "float32", "version": 0})
    with pytest.raises(LinkError, match=r"ps:0 (closed the connection|is gone)"):
        worker.answer(0)
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


HELLO = {"name": "worker:1", "nonce": "0" * 64}


def framed(kind: Any, meta: Any, tensors: Any = ()) -> bytes:
    """A frame of any content."""
    text = json.dumps([kind, meta, tensors]).encode()
    return HEAD.pack(b"tkl2", len(text)) + text


GARBAGE = [
    random.Random(5).randbytes(199),
    HEAD.pack(b"tkl2", 2**32 - 1),
    HEAD.pack(b"tkl2", 60_000) + b"[" * 60_000,
    HEAD.pack(b"tkl2", 900) + b"[" * 900,
    framed("push", HELLO, [["x", "float32", 2**40]]),
    framed("hello", HELLO, [["x", "float32", 2**40]]),
    framed("hello", HELLO) + framed("proof", {}),
    framed("hello", HELLO, [["x", "object", -1]]),
    framed(["hello"], [HELLO], 3),
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


PULL = {"version": 0, "dtype": "float32", "skip": []}
ROWS = torch.tensor([101])
BAD: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = [
    ("push", {"key": "a"}, {"99": torch.zeros(3)}),
    ("push", {"key": "a"}, {"-1": torch.zeros(3)}),
    ("push", {"key": "a"}, {"0": torch.zeros(3)}),
    ("push", {"key": "a"}, {"0": torch.zeros(10**6)}),
    ("push", {"key": "a"}, {"0.rows": ROWS}),
    ("push", {"key": "a"}, {"0.rows": ROWS, "0.values": torch.ones(37)}),
    ("push", {"key": "a"}, {"0.rows": torch.tensor([2, 1]), "0.values": torch.ones(74)}),
    ("push", {"key": "a" * 2000}, {}),
    ("push", {"keys": ["a"]}, {}),
    ("rows", {"piece": 0, "dtype": "float32"}, {"rows": ROWS}),
    ("rows", {"piece": 99, "dtype": "float32"}, {"rows": ROWS}),
    ("pull", PULL | {"version": "x"}, {}),
    ("pull", PULL | {"dtype": "object"}, {}),
    ("pull", PULL | {"skip": ["0"]}, {}),
    ("load", {"key": "param/large.weight", "shape": [2**40]}, {}),
]


def test_an_invalid_request_of_an_authenticated_peer_is_refused_or_ends_its_connection() -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        before = farm.chief.state()
        for kind, meta, tensors in BAD:
            worker = farm.client()
            with suppress(LinkError):  # the server may end the connection before all of a request is sent
                worker.links[0].send(kind, meta, tensors)
                assert worker.links[0].receive(5).kind == "refused", (kind, meta)
            worker.close()
        equal(farm.chief.state(), before)


def test_a_worker_that_dies_in_the_middle_of_a_push_leaves_nothing() -> None:
    push = framed("push", {"key": "a"}, [["0", "float32", 37 * 101]])
    with serving(Net(), optimizer_of("sgd")) as farm:
        before, worker = farm.chief.state(), farm.client()
        worker.links[0]._connection.sendall(push + bytes(99))
        worker.close()
        with pytest.raises(TrainingError, match="ps:0 refuses: there is no gradient a"):
            farm.chief.apply(version=1, lr_factor=1.0, keys=["a"])
        equal(farm.chief.state(), before)
