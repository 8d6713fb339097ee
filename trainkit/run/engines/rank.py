"""A rank of a run in a process that an engine started: our worker, watched, its end reported to the engine."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import Launch, workers
from trainkit.cluster.tasks import Task
from trainkit.reading import open_regular
from trainkit.run.engines.attempt import RankError, stop_file, stop_reason
from trainkit.run.environment import worker_environ
from trainkit.run.evidence import Evidence
from trainkit.run.failure import culprit, hanging
from trainkit.run.fence import VARIABLE as FENCE
from trainkit.run.fence import Fence
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited, WorkerGroup
from trainkit.run.last_words import read_last_words, write_last_words
from trainkit.run.limits import TimeLimits
from trainkit.run.network import socket_environ
from trainkit.run.stacks import stacks_of
from trainkit.run.stopping import EXIT_CODES, Reason, signal_of
from trainkit.run.watching import Watch

__all__ = ["Place", "cargo_of", "run_rank"]

_CLEAN: Final = frozenset(EXIT_CODES.values())
_WORKER: Final = (sys.executable, "-m", "trainkit.run.worker")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the engine says of a process it started."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    """Ranks of this host."""

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are on this host."""
        return self.num_local == self.num_ranks


def cargo_of(
    folder: RunFolder,
    *,
    kind: str,
    store: tuple[str, int],
    environ: Mapping[str, str],
    cuda: bool,
    limits: TimeLimits,
    elastic: bool = False,
) -> dict[str, Any]:
    """What every rank is handed, as plain values.

    Args:
        folder: the run folder.
        kind: the engine's name.
        store: where the ranks meet.
        environ: variables for the worker, on top of those of the engine's process.
        cuda: whether a rank has a GPU, the only one it sees.
        limits: how long a rank may make no progress.
        elastic: whether the run goes on without hosts that are lost.
    """
    return {
        "folder": str(folder.path.absolute()),
        "cwd": str(Path.cwd()),
        "kind": kind,
        "store": list(store),
        "environ": dict(environ),
        "device": "cuda:0" if cuda else "cpu",
        "limits": asdict(limits),
        "elastic": elastic,
    }


def run_rank(cargo: Mapping[str, Any], place: Place, attempt: list[str] | None) -> None:
    """Run one rank to its end, in a process that dies with this one.

    Args:
        cargo: of `cargo_of`.
        place: who this process is.
        attempt: what `open_attempt` gave rank 0.

    Raises:
        RankError: it failed; the folder tells why.
        ConfigError: this host does not see the run folder.
    """
    if attempt is None:
        return
    number, token = attempt
    folder = RunFolder(Path(cargo["folder"]))
    Fence.seen(folder, token)
    exits: queue.SimpleQueue[Exited] = queue.SimpleQueue()
    with WorkerGroup(int(number), exits.put) as group:
        evidence = Evidence(folder, lambda: group.marks)
        command = [*_WORKER, str(folder.resolved)]
        environ = {**_environ(cargo, place, attempt), FENCE: token}
        group.start(place.rank, command, environ, folder.log_of(place.rank), cwd=_seen(cargo["cwd"]))
        code = _watch(group, exits, folder, place, TimeLimits.of(cargo["limits"]), evidence=evidence)
    if code not in _CLEAN or (code == 0 and not folder.done_of(place.rank).exists()):
        raise RankError(_explained(folder, place, code, evidence))


def _environ(cargo: Mapping[str, Any], place: Place, attempt: list[str]) -> dict[str, str]:
    host, port = cargo["store"]
    launch = Launch(
        kind=cargo["kind"],
        tasks=workers(place.num_ranks),
        rank=place.rank,
        local_rank=place.local_rank,
        num_local=place.num_local,
        num_hosts=1 if place.is_alone else place.num_ranks,
        store=(host, int(port)),
    )
    identity = Identity(
        task=Task(role="worker", index=place.rank, rank=place.rank, device=cargo["device"]),
        num_ranks=place.num_ranks,
        store=launch.store,
        prefix="/".join(("attempt", *attempt)),
        attempt=int(attempt[0]),
    )
    return worker_environ({**socket_environ(launch), **os.environ, **cargo["environ"]}, identity)


def _seen(cwd: str) -> Path | None:
    """The folder that the command was given in, where this host has it: relative paths of the config start there."""
    return Path(cwd) if Path(cwd).is_dir() else None


def _watch(
    group: WorkerGroup,
    exits: queue.SimpleQueue[Exited],
    folder: RunFolder,
    place: Place,
    limits: TimeLimits,
    *,
    evidence: Evidence,
) -> int:
    """Wait for the end; pass a request to stop on, once."""
    watch, told = Watch(limits, folder, sees_all=place.is_alone, pid_of=evidence.pid), False
    seen = range(place.num_ranks) if place.is_alone else [place.rank]  # a host does not see the beats of another
    while True:
        try:
            return exits.get(timeout=watch.interval_s).code
        except queue.Empty:
            pass
        if not told and stop_file(folder).exists():
            told = True
            group.signal(signal_of(_reason_of_stop(folder)))
        overdue = watch.look(seen)
        if overdue is not None and overdue.rank == place.rank:  # another rank is ended by its own watch
            failure = hanging(folder, overdue, [place.rank], evidence)
            with open_regular(folder.log_of(place.rank), "ab") as log:
                log.write(f"{stacks_of(group, folder, place.rank, evidence.pid(place.rank))}\n".encode())
            write_last_words(folder.error_of(place.rank), place.rank, RankError(failure.headline))
            group.kill()


def _reason_of_stop(folder: RunFolder) -> Reason:
    said = stop_reason(folder)
    return "stopped" if said == "stopped" else "hangup" if said == "hangup" else "preempted"


def _explained(folder: RunFolder, place: Place, code: int, evidence: Evidence) -> str:
    """What became of the rank; one that said nothing is spoken for."""
    exited = Exited(attempt=0, rank=place.rank, code=code)
    headline = culprit(folder, [exited], [], evidence).headline
    if read_last_words(folder.error_of(place.rank)) is None:
        write_last_words(folder.error_of(place.rank), place.rank, RankError(headline))
    return headline
