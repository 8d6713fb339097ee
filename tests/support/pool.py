"""Processes that stay: a multi-process test pays for its work, not for starting Python and importing torch.

All but one are forks of a process that has imported torch and trainkit (`quick.py`). Rank 1 starts as it is: its sets
have another order than those of the forks, as those of two ranks of a user have.

A task is a module-level function, given by its dotted path. Each of `num_ranks` workers calls it with its `Member` and
the task's arguments; the results come back in the order of the ranks. With `group=True` the workers stand in a gloo
process group of their own for the length of the task. A task that raises, dies or outstays its time costs its
workers, never the session: they are replaced, and the error of the first failing rank is raised here.

Example:
    def total(member: Member, start: int) -> int:
        tensor = torch.tensor(start + member.rank)
        torch.distributed.all_reduce(tensor)
        return int(tensor)

    assert pool.run("tests.support.test_pool.total", 10, num_ranks=2, group=True) == [21, 21]
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tests.support import quick

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.pool_worker"
PATIENCE = "POOL_PATIENCE_S"
"""The environment variable that bounds how long any task may take: where a planted bug makes ranks wait for ever."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a task, and the store that its ranks share."""

    rank: int
    num_ranks: int
    store: tuple[str, int]
    """Host and port of a store on this machine, for process groups."""
    prefix: str
    """What the keys of this task begin with there; no other task has it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a worker is asked."""

    function: str
    args: tuple[Any, ...]
    member: Member
    group: bool


class TaskError(AssertionError):
    """A rank of a task failed; its traceback is the message."""


class Pool:
    """Workers of one session, started as the largest task so far needed them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._tasks = 0
        self._store: TCPStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._store = None

    def run(self, function: str, *args: Any, num_ranks: int, group: bool = False, timeout_s: float = 240) -> list[Any]:
        """Call a function on every rank of a task and wait for all of them.

        Args:
            function: dotted path of a module-level function whose first parameter is its `Member`.
            args: further arguments, picklable.
            num_ranks: workers that take part.
            group: whether they share a gloo process group while it runs.
            timeout_s: after which the workers are killed.

        Returns:
            What the function returned, in the order of the ranks.

        Raises:
            TaskError: a rank raised, died or ran out of time.
        """
        while len(self._workers) < num_ranks:
            self._workers.append(_Worker(len(self._workers)))
        workers = self._workers[:num_ranks]
        self._tasks += 1
        member = Member(rank=0, num_ranks=num_ranks, store=self.address(), prefix=f"task/{self._tasks}")
        request = Request(function=function, args=args, member=member, group=group)
        for rank, worker in enumerate(workers):
            worker.send(replace(request, member=replace(member, rank=rank)))
        return self._collect(workers, function, timeout_s)

    def address(self) -> tuple[str, int]:
        """The session's store, on loopback alone: given only a name, it would listen on every interface."""
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # collecting needs no torch

            listening = socket.create_server(("127.0.0.1", 0))
            port = listening.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        return "127.0.0.1", self._store.port

    def _collect(self, workers: Sequence[_Worker], function: str, timeout_s: float) -> list[Any]:
        timeout_s = min(timeout_s, float(os.environ.get(PATIENCE, "inf")))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < len(workers):
            open_ranks = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in results}
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._replace(workers)
                msg = f"{function}: ranks {sorted(open_ranks.values())} gave no answer in {timeout_s:.0f} s"
                raise TaskError(msg)
            for connection in ready:
                rank = open_ranks[connection]  # type: ignore[index]
                results[rank], failure = workers[rank].receive()
                if failure is not None:
                    self._replace(workers)
                    msg = f"{function}, rank {rank} of {len(workers)}:\n{failure}"
                    raise TaskError(msg)
        return [results[rank] for rank in range(len(workers))]

    def _replace(self, workers: Sequence[_Worker]) -> None:
        # In their places: a process keeps its rank, because torch caches what DTensors hold by mesh, not by rank.
        for rank, worker in enumerate(workers):
            worker.kill()
            self._workers[rank] = _Worker(rank)


class _Worker:
    """One process and the socket to it."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: text for name, text in os.environ.items() if not name.startswith("TRAINKIT_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        itself = str(theirs.fileno())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, itself] if rank == 1 else quick.command(itself, module=MODULE),
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())

    def send(self, request: Request) -> None:
        self.connection.send(request)

    def receive(self) -> tuple[Any, str | None]:
        """A result and None, or None and what went wrong."""
        try:
            result, failure = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None, f"ended with exit code {self.process.wait(timeout=10)}"  # 139: a fork that was killed
        return result, failure

    def close(self) -> None:
        """End it politely: it ends when its socket does."""
        self.connection.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()
