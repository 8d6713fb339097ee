"""The handshake by which the processes of an external launch find each other in a store with keys of dead processes.

A store may outlive its ranks (the one of torchrun's agents does), and no environment variable tells two groups in it
apart: each agent counts restarts by itself. So rank 0 creates a unique prefix for the group, and sends it to every
process that announces itself under a name never used before:

rank 1    arrival/1 = "1 of 2, named X"          rank 0    answer/X = PREFIX
          PREFIX/present/1                                 ... until all are present
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.run.rendezvous.store_client import StoreClient
from trainkit.run.rendezvous.wait import WaitReporter

__all__ = ["accept_all", "join"]

_POLL_S: Final = 0.05
_NAME_LENGTH: Final = 64


def accept_all(
    store: StoreClient,
    num_ranks: int,
    ranks: Iterable[int],
    waiter_for: Callable[[Callable[[], Iterable[int]]], WaitReporter],
) -> str:
    """Answer every announcement until all ranks of this group are present; for rank 0.

    Args:
        store: the store.
        num_ranks: processes of the launch.
        ranks: those of them that form this group.
        waiter_for: creates a `WaitReporter` for the missing ranks that a function returns.

    Returns:
        The prefix of this group.

    Raises:
        HangError: a rank did not arrive.
    """
    prefix, seen = uuid.uuid4().hex, 0
    missing = set(ranks) - {0}
    waiter = waiter_for(lambda: missing)
    while True:
        for number in range(seen + 1, store.add("trainkit/arrivals", 0) + 1):
            if not store.has(f"trainkit/arrival/{number}"):
                break
            seen = number
            size, _, name = store.get(f"trainkit/arrival/{number}").decode(errors="replace").partition(" ")
            if size == str(num_ranks) and len(name) <= _NAME_LENGTH:  # ignore processes of another launch
                store.set(f"trainkit/answer/{name}", prefix)
        missing -= {rank for rank in missing if store.has(f"{prefix}/present/{rank}")}
        if not missing:
            return prefix
        waiter.wait(_POLL_S)


def join(store: StoreClient, launch: LaunchEnvironment, stack: ExitStack, waiter: WaitReporter) -> str:
    """Announce this process, and return the prefix that rank 0 sends; for ranks above 0.

    Raises:
        HangError: rank 0 did not arrive.
    """
    while True:
        try:
            return _announce(store, launch, waiter)
        except RuntimeError:  # the store's DistError: rank 0 was closing the store of an earlier run
            waiter.wait(_POLL_S)
            store.open(stack, waiter)


def _announce(store: StoreClient, launch: LaunchEnvironment, waiter: WaitReporter) -> str:
    name = uuid.uuid4().hex
    number = store.add("trainkit/arrivals", 1)
    store.set(f"trainkit/arrival/{number}", f"{launch.num_ranks} {name}")
    while not store.has(f"trainkit/answer/{name}"):
        waiter.wait(_POLL_S)
    prefix = store.get(f"trainkit/answer/{name}").decode(errors="replace")
    store.set(f"{prefix}/present/{launch.rank}", "")
    return prefix
