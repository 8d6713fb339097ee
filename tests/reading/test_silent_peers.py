"""A rank that waits for ever for a peer that listens and never answers is caught here alone.

So is a message in the store that this launch did not write: the error names the place.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.waiting import wait_for
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Identity
from trainkit.errors import HangError, LinkError
from trainkit.run.rendezvous import barrier as boards
from trainkit.run.rendezvous.barrier import ProcessBarrier, StoreClient, WaitReporter
from trainkit.strategies import rendezvous_store
from trainkit.strategies.groups.process_group import ProcessGroup
from trainkit.strategies.rendezvous_store import HostedStore, store_client

OPEN = Path("/proc/self/fd")


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """The address of a socket that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
        yield address


@pytest.fixture
def board() -> Iterator[StoreClient]:
    """A process of a launch that has found the store."""
    with HostedStore() as store, ExitStack() as stack:
        store.open()
        client = StoreClient(launch_at(store.address))
        client.open(stack, WaitReporter(lambda: "rank 0", timeout_s=30))
        yield client
        client.close()


def launch_at(address: tuple[str, int]) -> LaunchEnvironment:
    return LaunchEnvironment(
        kind="a test", tasks=workers(2), rank=1, local_rank=1, num_local=2, num_hosts=1, store=address
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists what is open on Linux alone")
def test_a_rank_that_has_left_its_group_is_no_client_of_the_store() -> None:
    with HostedStore() as store:
        store.open()
        for number in range(12):
            ProcessGroup().join(replace(Identity.solo(), store=store.address, prefix=str(number)))
            dist.destroy_process_group()
            if number == 1:  # the first has what the process keeps
                num_open = len([*OPEN.iterdir()])
        wait_for(lambda: len([*OPEN.iterdir()]) <= num_open, timeout_s=20)


@pytest.mark.slow
def test_a_launch_gives_up_a_store_that_accepts_and_never_answers(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "_CONNECT_S", 0.5)  # how long torch tries again, once the socket is closed
    with ExitStack() as stack, pytest.raises(HangError, match=r"waited 1 s \(supervisor.join_timeout_s\) for"):
        StoreClient(launch_at(silent)).open(stack, WaitReporter(lambda: "rank 0", timeout_s=1, log=lambda _: None))


@pytest.mark.slow
def test_a_store_that_closes_while_a_task_connects_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "reachable", lambda *_: True)  # it was, a moment ago
    monkeypatch.setattr(boards, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = ended.getsockname()
    waiter = WaitReporter(lambda: "the chief", timeout_s=1, log=lambda _: None)
    with ExitStack() as stack, pytest.raises(HangError, match="for the chief"):
        StoreClient(launch_at(address)).open(stack, waiter)


def test_a_rank_gives_up_a_store_that_is_gone_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = ended.getsockname()
    with pytest.raises(LinkError, match=f"no store listens at 127.0.0.1:{address[1]}: Connection refused"):
        store_client(address, timeout_s=600)


def test_a_rank_gives_up_a_store_that_accepts_and_never_answers(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "_START_S", 0.2)
    with pytest.raises(LinkError, match=f"127.0.0.1:{silent[1]} accepts connections and does not answer"):
        store_client(silent, timeout_s=0.2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("[" * 100_000, "its JSON is nested deeper than 64"),
        ("[]", "it is not a message of every rank"),
        (
            '[{"failed": {"rank": 0}, "result": null}, {"failed": null, "result": null}]',
            "it is not a report of a failure",
        ),
    ],
    ids=["nothing", "nested", "a list", "no report"],
)
def test_a_foreign_message_is_refused_with_the_place_and_the_reason(board: StoreClient, text: str, reason: str) -> None:
    meeting = ProcessBarrier(launch_at(board.address), timeout_s=5)
    meeting.store, meeting.prefix = board, "group"
    board.set("group/round/1", text)
    with pytest.raises(LinkError, match=f"holds no message of this launch under group/round/1: {reason}"):
        meeting.run_on_rank0(lambda: None)
