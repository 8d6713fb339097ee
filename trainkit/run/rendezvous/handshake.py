"""How the processes of a launch find each other in a store that may hold what dead ones said.

A store may outlive its ranks (that of torchrun's agents does), and no variable tells two groups in it apart: agents
count restarts each for itself. So a group makes a prefix of its own, told by its rank 0 to those who ask by a name that
nobody had before:

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
    board: StoreClient,
    num_ranks: int,
    ranks: Iterable[int],
    patience_for: Callable[[Callable[[], Iterable[int]]], WaitReporter],
) -> str:
    """Answer all who arrive until every rank of this group has said that it is there; for rank 0.

    Args:
        board: the store.
        num_ranks: processes of the launch.
        ranks: those of them that this group is made of.
        patience_for: how long to wait for the ranks that a function names.

    Returns:
        The prefix of this group.

    Raises:
        HangError: somebody did not come.
    """
    prefix, seen = uuid.uuid4().hex, 0
    missing = set(ranks) - {0}
    patience = patience_for(lambda: missing)
    while True:
        for number in range(seen + 1, board.add("trainkit/arrivals", 0) + 1):
            if not board.has(f"trainkit/arrival/{number}"):
                break
            seen = number
            size, _, name = board.get(f"trainkit/arrival/{number}").decode(errors="replace").partition(" ")
            if size == str(num_ranks) and len(name) <= _NAME_LENGTH:  # a stranger's arrival is none
                board.set(f"trainkit/answer/{name}", prefix)
        missing -= {rank for rank in missing if board.has(f"{prefix}/present/{rank}")}
        if not missing:
            return prefix
        patience.wait(_POLL_S)


def join(board: StoreClient, launch: LaunchEnvironment, stack: ExitStack, patience: WaitReporter) -> str:
    """Arrive, and be told the prefix of this group; for the others.

    Raises:
        HangError: rank 0 did not come.
    """
    while True:
        try:
            return _announce(board, launch, patience)
        except RuntimeError:  # the store's DistError: rank 0 was closing that of an earlier run
            patience.wait(_POLL_S)
            board.open(stack, patience)


def _announce(board: StoreClient, launch: LaunchEnvironment, patience: WaitReporter) -> str:
    name = uuid.uuid4().hex
    number = board.add("trainkit/arrivals", 1)
    board.set(f"trainkit/arrival/{number}", f"{launch.num_ranks} {name}")
    while not board.has(f"trainkit/answer/{name}"):
        patience.wait(_POLL_S)
    prefix = board.get(f"trainkit/answer/{name}").decode(errors="replace")
    board.set(f"{prefix}/present/{launch.rank}", "")
    return prefix
