"""What a process of a launch needs before it does its part: a network, an identity, and a log of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainkit.cluster.address import Address, is_loopback
from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.reading import open_regular
from trainkit.run.planning.plan import RunPlan
from trainkit.run.rendezvous.network import own_address, socket_environ

__all__ = ["configure_network", "identity_for", "redirect_output"]


def configure_network(launch: LaunchEnvironment) -> None:
    """The network of a process that may have others on its host."""
    for name, value in socket_environ(launch).items():
        os.environ.setdefault(name, value)


def identity_for(
    launch: LaunchEnvironment, plan: RunPlan, *, store: tuple[str, int], prefix: str, token: str = "", life: int = 0
) -> Identity:
    """Who this process is in the group of a launch.

    Args:
        launch: the launch.
        plan: the run, with a task a process.
        store: where the group has met.
        prefix: of the group's keys there.
        token: what the tasks of the run know, where they need one.
        life: how often this task joined this group before.
    """
    return Identity(
        task=plan.tasks[launch.rank],
        num_ranks=len(plan.tasks),
        store=store,
        prefix=f"{prefix}/group",
        attempt=launch.attempt,
        life=life,
        token=token,
        host=_host(launch),
    )


def _host(launch: LaunchEnvironment) -> str:
    """How other processes reach this host: as the launch names it, else by the way to the store."""
    if launch.num_hosts == 1 or is_loopback(launch.store[0]):
        return "127.0.0.1"
    if launch.addresses:
        return Address.parse(launch.addresses[launch.rank]).host
    return own_address(launch.store[0]) or launch.store[0]


@contextlib.contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Whatever this process and its children print goes into a log: the terminal is rank 0's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open_regular(log, "ab") as file:
        _redirect([file.fileno(), file.fileno()])
    try:
        yield
    finally:
        _redirect(kept)
        for descriptor in kept:
            os.close(descriptor)


def _redirect(targets: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, target in zip((1, 2), targets, strict=True):
        os.dup2(target, descriptor)
