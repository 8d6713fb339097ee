"""Set up a process of an external launch: its network, its identity, and its log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.cluster.address import Address, is_loopback, own_address
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity
from trainkit.files import open_regular
from trainkit.run.planning.plan import RunPlan


@contextlib.contextmanager
def variables(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Set environment variables while the block runs, all or those that the user has not set, and restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if not unless_set or before[name] is None})
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = earlier


def identity_for(
    launch: LaunchEnvironment, plan: RunPlan, *, store: tuple[str, int], prefix: str, token: str = "", life: int = 0
) -> Identity:
    """Return the identity of this process in the group of a launch.

    The address of its host for other processes is that of the launch, else the one on the route to the store.
    """
    if launch.num_hosts == 1 or is_loopback(launch.store[0]):
        host = "127.0.0.1"
    elif launch.addresses:
        host = Address.parse(launch.addresses[launch.rank]).host
    else:
        host = own_address(launch.store[0]) or launch.store[0]
    return Identity(
        task=plan.tasks[-1 if launch.task.is_evaluator else launch.rank],
        num_ranks=len(plan.training_tasks),
        store=store,
        prefix=f"{prefix}/group",
        attempt=launch.attempt,
        life=life,
        token=token,
        host=host,
    )


def announce_log(launch: LaunchEnvironment, log: Path) -> None:
    """Print which task this process is and where its output goes, if it was started by hand in its own terminal."""
    if launch.by_hand:
        shown = os.path.relpath(log) if log.absolute().is_relative_to(Path.cwd()) else log
        line = f"{launch.task}, rank {launch.rank} of {launch.num_ranks}: its output goes to {shown}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal


_replaced_outputs: list[list[int]] = []
"""Descriptors of the standard output and error that `redirect_output` has replaced, outermost first."""


def print_on_terminal(text: str) -> None:
    """Print on the standard error of this process, also while its output is redirected to a log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - into the log, or on the terminal
    if _replaced_outputs:
        os.write(_replaced_outputs[0][1], f"{text}\n".encode())


@contextlib.contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to a log: the terminal belongs to rank 0."""
    log.parent.mkdir(parents=True, exist_ok=True)
    replaced = [os.dup(descriptor) for descriptor in (1, 2)]
    _replaced_outputs.append(replaced)
    with open_regular(log, "ab") as file:
        _redirect([file.fileno(), file.fileno()])
    try:
        yield
    finally:
        _redirect(replaced)
        _replaced_outputs.remove(replaced)
        for descriptor in replaced:
            os.close(descriptor)


def _redirect(targets: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, target in zip((1, 2), targets, strict=True):
        os.dup2(target, descriptor)
