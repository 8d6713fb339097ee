"""Processes of a launch, in the pool: each as it would be where a launcher had started it."""

import contextlib
import io
import json
import os
import socket
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.pool import Member
from tests.support.settings import latest

RUN = (
    "recipe=null", "steps=12", "batch.micro_size=16", "numerics.reproducible=true", "callbacks=[]",
    "logger=[]", "quiet=true", "strategy=multi_worker_mirrored", "hydra.run.dir=run",
)  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports that differ: a port that was closed may be given out again at once."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def free_port() -> int:
    return free_ports(1)[0]


def variables(member: Member, port: int) -> dict[str, str]:
    """Variables that a user sets by hand."""
    return {
        "RANK": str(member.rank), "WORLD_SIZE": str(member.num_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


Outcome = tuple[dict[str, Any] | None, tuple[str, int, str] | None, str]
"""What it returned, what it raised, what it printed."""


def train(member: Member, folder: str, port: int, *overrides: str, environ: dict[str, str] | None = None) -> Outcome:
    """Train as a process of a launch: what it returned, what it raised as (class, code, text), what it printed."""
    from trainkit import api
    from trainkit.errors import TrainkitError

    launch_environ = variables(member, port) | (environ or {})
    stderr = io.StringIO()
    with mock.patch.dict(os.environ, launch_environ), contextlib.chdir(folder), contextlib.redirect_stderr(stderr):
        try:
            return api.train(api.compose(latest(*RUN, *overrides))), None, stderr.getvalue()
        except TrainkitError as error:
            return None, (type(error).__name__, error.exit_code, str(error)), stderr.getvalue()


def train_twice(member: Member, folder: str, port: int) -> list[Outcome]:
    """Train, and train again as soon as that is done."""
    return [train(member, folder, port, f"seed={seed}", f"hydra.run.dir=run_{seed}") for seed in (1, 2)]


def train_unlike(member: Member, folder: str, port: int, arguments: list[list[str]]) -> Outcome:
    """Train, each process with arguments of its own."""
    return train(member, folder, port, *arguments[member.rank])


def train_as(member: Member, folder: str, port: int, environ: dict[str, str], overrides: tuple[str, ...]) -> Outcome:
    """Train with further variables."""
    local = {"LOCAL_RANK": str(member.rank), "LOCAL_WORLD_SIZE": str(member.num_ranks)}
    return train(member, folder, port, *overrides, environ=local | environ)


def train_as_task(
    member: Member, folder: str, port: int, cluster: dict[str, list[str]], overrides: tuple[str, ...]
) -> Outcome:
    """Train as a task of a cluster that TF_CONFIG names; the first one, which waits for no late worker, comes last."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from trainkit.run.rendezvous import barrier

    store, other_ranks = TCPStore(*member.store, is_master=False), range(1, member.num_ranks)
    reachable = barrier.reachable

    def looking(host: str, port: int) -> bool:
        store.set(f"{member.prefix}/{member.rank}", "")
        return reachable(host, port)

    if member.rank == 0:
        store.wait([f"{member.prefix}/{rank}" for rank in other_ranks])
    role, index = [(role, index) for role, texts in cluster.items() for index in range(len(texts))][member.rank]
    task = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
    # an evaluator lowers the priority of its process
    with mock.patch.object(os, "nice"), mock.patch.object(barrier, "reachable", looking):
        try:
            return train(member, folder, port, *overrides, environ={"RANK": "", "WORLD_SIZE": "", "TF_CONFIG": task})
        finally:  # also a task that is refused before it looks
            store.set(f"{member.prefix}/{member.rank}", "")


def train_alone(member: Member, folder: str, port: int, *overrides: str) -> Outcome:
    """Train as rank 0 of two; rank 1 never joins."""
    return train(replace(member, num_ranks=2), folder, port, *overrides)


def train_impatiently(member: Member, folder: str, port: int, *overrides: str) -> Outcome:
    """Train where a locked folder is refused at once."""
    from trainkit.run.rendezvous import join as joining

    with mock.patch.object(joining, "_LOCK_TIMEOUT_S", 0.0):
        return train(member, folder, port, *overrides)


def train_apart(member: Member, folder: str, port: int, environs: list[dict[str, str]]) -> Outcome:
    """Train, each process with variables of its own."""
    return train(member, folder, port, environ=environs[member.rank])


def train_with_one_unlike(member: Member, folder: str, port: int, name: str, answer: Any) -> Outcome:
    """Train where a function of trainkit returns something else on rank 1, or fails there."""
    behavior = {"side_effect": answer} if isinstance(answer, Exception) else {"return_value": answer}
    with mock.patch(name, **behavior) if member.rank == 1 else contextlib.nullcontext():
        return train(member, folder, port)
