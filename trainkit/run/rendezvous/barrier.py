"""The barrier at which the processes of an external launch wait for each other before they train.

The launcher or rank 0 hosts the store. It may outlive its ranks (that of torchrun's agents does), and no environment
variable distinguishes two groups in it: each agent counts restarts by itself. So rank 0 creates a unique prefix for the
group, and sends it to every process that announces itself under a name never used before:

    rank 1    arrival/2/1 = X                        rank 0    answer/X = PREFIX
              PREFIX/present/1                                 ... until all are present

Then they communicate in rounds: all run a function, or rank 0 alone, and if one fails, all fail. Processes with
different configs or plans are refused. Whatever error leaves the barrier on a rank is published, and ends every wait of
the others; so does the end of a process of this host.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from trainkit.cluster.address import Address, is_loopback, own_address
from trainkit.cluster.host import ProcessId, host_id, mig_instances
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.composition import dotted
from trainkit.config.schema import RunConfig
from trainkit.config.values import leaves
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, HangError, LinkError, PeerError, Problem, refuse, yaml_text
from trainkit.files import expect_maps, parse_json
from trainkit.run.begin import packages
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.error_report import ErrorReport, error_report, report_from_json
from trainkit.strategies.rendezvous_store import HostedStore, Pending
from trainkit.trainer.ownership import print_notice

_FIRST_S: Final = 3.0
_LONGEST_S: Final = 60.0


class WaitReporter:
    """Sleeps in short intervals and logs the missing ranks: after 3 s, then at intervals that double up to 60 s."""

    def __init__(
        self,
        missing: Callable[[], str],
        *,
        timeout_s: float,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._missing, self._timeout_s, self._log = missing, timeout_s, log or print_notice
        self._clock, self._sleep = clock, sleep
        self._begun = clock()
        self._interval_s = min(_FIRST_S, timeout_s / 2)
        self._next_line_s = self._interval_s

    def wait(self, moment_s: float) -> None:
        """Sleep for a moment.

        Raises:
            HangError: the timeout has passed.
        """
        waited = self._clock() - self._begun
        if waited >= self._timeout_s:
            raise HangError(f"waited {self._timeout_s:g} s (supervisor.join_timeout_s) for {self._missing()}.")
        if waited >= self._next_line_s:
            self._log(f"waiting for {self._missing()}" + (f", {waited:.0f} s" if waited > _FIRST_S * 1.5 else ""))
            self._interval_s = min(self._interval_s * 2, _LONGEST_S)
            self._next_line_s = waited + self._interval_s
        self._sleep(moment_s)


_CONNECT_POLL_S: Final = 0.2
_CONNECT_S: Final = 30.0
"""Seconds of one attempt to connect to the store."""
_ANSWER_S: Final = 300.0
"""Seconds that the store may take to answer; its process may be stopped, or the machine loaded."""
_ANSWER_AFTER_FAILURE_S: Final = 5.0
"""The same once a rank has failed: it may be the one that hosts the store."""
_CHECK_VALID_S: Final = 2.0
"""Seconds for which a successful connection check is valid."""


class StoreClient:
    """Keys and values that every process of a launch sees.

    `TCPStore` waits without limit for an answer, even if the network is down: each operation first checks that the
    server accepts connections. Failures are RuntimeErrors, like torch's own errors of the store.
    """

    def __init__(self, launch: LaunchEnvironment) -> None:
        self._launch = launch
        self.address = launch.store
        """Host and port of the store."""
        self._checked_at = 0.0
        self._answer_s = _ANSWER_S
        self._unanswered: Pending[Any] | None = None
        self._store: Any = None

    def open(self, stack: ExitStack, waiter: WaitReporter) -> None:
        """Host the store, if this process does so, or wait until it is reachable.

        Raises:
            ConfigError: the address does not belong to this host, or is in use.
            HangError: no server answers there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - torch takes 1 s

        if self._launch.hosts_store:
            hosted = stack.enter_context(store_of_launch(self._launch))
            hosted.open()
            self.address = hosted.address
        self._store = None
        # torch tries a refused connection again until its timeout: that of the store of a run that has just ended
        timeout = timedelta(seconds=_CONNECT_S)
        while self._store is None:
            while not reachable(*self.address):
                waiter.wait(_CONNECT_POLL_S)
            connecting = Pending(
                lambda: TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=timeout)
            )
            while not connecting.wait(_CONNECT_POLL_S):  # a server that listens but never answers would block for ever
                waiter.wait(0)
            with contextlib.suppress(RuntimeError):  # the store's DistError
                self._store = connecting.result()
        self._store.set_timeout(timedelta(seconds=_ANSWER_S))

    def close(self) -> None:
        """Drop the connection to the store."""
        self._store = None

    def invalidate(self) -> None:
        """Check before the next operation whether the store can be reached, and wait less for it from now on."""
        self._checked_at, self._answer_s = 0.0, _ANSWER_AFTER_FAILURE_S

    def has(self, key: str) -> bool:
        """Return whether a key was set."""
        self._check_reachable()
        return bool(self._call(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes:
        """Return the value of a key that was set."""
        return bytes(self._call(lambda: self._store.get(key)))

    def message(self, key: str) -> Any:
        """Return the JSON value of a key.

        Raises:
            LinkError: it is not JSON: a process of another launch has written it.
        """
        try:
            return parse_json(self.get(key))
        except ValueError as error:
            raise self.misfit(key, error) from None

    def misfit(self, key: str, error: ValueError) -> LinkError:
        """Return the error for a key that holds no message of this launch."""
        host, port = self.address
        return LinkError(f"the store at {host}:{port} holds no message of this launch under {key}: {error}")

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""
        self._check_reachable()
        return int(self._call(lambda: self._store.add(key, amount)))

    def _call(self, operation: Callable[[], T]) -> T:
        if self._unanswered is None or self._unanswered.wait(0):  # its connection serves one operation after the other
            pending = Pending(operation)
            if pending.wait(min(self._answer_s, _ANSWER_S)):
                return pending.result()
            self._unanswered = pending
        raise RuntimeError("the store of the launch does not answer")

    def _check_reachable(self) -> None:
        if not self._launch.hosts_store and time.monotonic() - self._checked_at > _CHECK_VALID_S:
            if not reachable(*self.address):
                raise RuntimeError("the store of the launch cannot be reached")
            self._checked_at = time.monotonic()


def reachable(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether a server answers at an address."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def store_of_launch(launch: LaunchEnvironment) -> HostedStore:
    """Create the store that rank 0 hosts if the launcher hosts none: it listens at the launch's address only.

    If this host resolves its own name to the loopback interface (Debian gives 127.0.1.1), other hosts could not
    connect: then the address of the outgoing interface is used.

    Raises:
        ConfigError: the address does not belong to this host, or is in use.
    """
    host, port = launch.store
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        ip = str(address[0])
        if launch.num_hosts > 1 and is_loopback(ip) and not is_loopback(host):
            ip = own_address() or ip
        return HostedStore((ip, port))
    except OSError as error:
        number = error.errno or 0  # resolver errors are negative, and have their own messages
        rule = f"rank 0 cannot listen there: {os.strerror(number) if number > 0 else error.strerror or error}."
        raise ConfigError([Problem(key="store", value=str(Address(host, port)), rule=rule)]) from error


T = TypeVar("T")

_POLL_S: Final = 0.05
_LOOK_S: Final = 0.5
"""Seconds between two looks for failures of other ranks."""
_EXIT_BARRIER_S: Final = 5.0
"""Seconds for which the rank that hosts the store waits at its end; a killed process never reaches the exit barrier."""


class ProcessBarrier:
    """Collective operations between the processes of an external launch, or some ranks of them, over its store."""

    def __init__(
        self,
        launch: LaunchEnvironment,
        *,
        timeout_s: float,
        stopped_s: float = math.inf,
        ranks: Iterable[int] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.launch = launch
        self.ranks = tuple(range(launch.num_ranks) if ranks is None else ranks)
        """The ranks that take part, in order; rank 0 is one of them."""
        self.prefix = ""
        """Prefix of the store keys of this group; unique to the group."""
        self._timeout_s, self._stopped_limit_s = timeout_s, stopped_s
        self._stopped_s: dict[int, float] = {}
        self._log = log
        self._num_barriers = 0
        self._has_failed = False
        self._looked_at = self._counted_at = 0.0
        self.processes: Mapping[int, Mapping[str, Any]] = {}
        """The process of each rank: its pid, start time and host."""
        self.store = StoreClient(launch)
        """The store itself; keys below `trainkit/` are known without the prefix, to late tasks and to later groups."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Host or find the store, and wait until all processes have arrived."""
        with self._stack:
            self.store.open(self._stack, self._waiter(lambda: [0]))
            if self.launch.rank == 0:
                self._accept_all()
            else:
                self._announce()
            # Exchanged before a rank can be lost: the store may be lost with it.
            process = {**asdict(ProcessId.of(os.getpid())), "at": host_id(), "host": socket.gethostname()}
            self.processes = dict(zip(self.ranks, self.all_gather_object(process), strict=True))
            self._stack = self._stack.pop_all()
        return self

    def _accept_all(self) -> None:
        """Answer every announcement with the prefix of the group until all its ranks are present; for rank 0.

        Raises:
            HangError: a rank did not arrive.
        """
        self.prefix, missing, size = uuid.uuid4().hex, set(self.ranks) - {0}, self.launch.num_ranks
        waiter = self._waiter(lambda: missing)
        while missing:
            for rank in missing:
                if self.store.has(arrival := f"trainkit/arrival/{size}/{rank}"):  # perhaps of an earlier group, as yet
                    self.store.set(f"trainkit/answer/{self.store.get(arrival).decode(errors='replace')}", self.prefix)
            missing -= {rank for rank in missing if self.store.has(f"{self.prefix}/present/{rank}")}
            if missing:
                waiter.wait(_POLL_S)

    def _announce(self) -> None:
        """Announce this process, and take the prefix that rank 0 sends; for ranks above 0.

        Raises:
            HangError: rank 0 did not arrive.
        """
        waiter, key = self._waiter(lambda: [0]), f"{self.launch.num_ranks}/{self.launch.rank}"
        while not self.prefix:
            name = uuid.uuid4().hex
            try:
                self.store.set(f"trainkit/arrival/{key}", name)
                while not self.store.has(f"trainkit/answer/{name}"):
                    waiter.wait(_POLL_S)
                prefix = self.store.get(f"trainkit/answer/{name}").decode(errors="replace")
                self.store.set(f"{prefix}/present/{self.launch.rank}", "")
                self.prefix = prefix
            except RuntimeError:  # the store's DistError: rank 0 was closing the store of an earlier run
                waiter.wait(_POLL_S)
                self.store.open(self._stack, waiter)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is not None and not isinstance(error, PeerError):
                self.publish_failure(error_report(self.launch.rank, error))
            num_others, deadline = len(self.ranks) - 1, time.monotonic() + _EXIT_BARRIER_S
            # The rank that hosts the store waits for the others, so that they can still read it; not for processes that
            # are known to have ended.
            with contextlib.suppress(RuntimeError):  # the store's DistError: its host has exited
                left = 0 if isinstance(error, KeyboardInterrupt) else self.store.add(f"{self.prefix}/left", 1)
                while self.launch.hosts_store and 0 < left <= num_others and time.monotonic() < deadline:
                    if len(self.ended_here()) == num_others:
                        break
                    time.sleep(_POLL_S)
                    left = self.store.add(f"{self.prefix}/left", 0)
            self.store.close()

    def run_everywhere(self, work: Callable[[], T]) -> T:
        """Run a function on every rank; return its result here, or fail everywhere if it fails on one; collective.

        Raises:
            TrainkitError: the function failed on some rank. Rank 0 raises the error of the lowest failed rank as it was
                raised there, the others raise a `PeerError`.
        """
        return self._agree(work, is_shared=False)

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0; return its result, JSON, on every rank, or fail as `run_everywhere`; collective."""
        return self._agree(work, is_shared=True)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a JSON value from every rank on every rank; collective."""
        return [message["result"] for message in self._exchange({"failed": None, "result": value})]

    def _agree(self, work: Callable[[], T], *, is_shared: bool) -> T:
        rank, error, results = self.launch.rank, None, list[T]()
        try:
            if rank == 0 or not is_shared:
                results.append(work())
        except Exception as failed:  # noqa: BLE001 - raised below, once the others know
            error = failed
        report = None if error is None else asdict(error_report(rank, error))
        messages = self._exchange({"failed": report, "result": results[0] if is_shared and results else None})
        for message in messages:
            if message["failed"] is not None:
                first = self._parse_report(self._round, message["failed"])
                if rank > 0:
                    raise self.peer_error(first) from error
                raise error if error is not None else first.error(self.launch.place_of(first.rank))
        return results[0] if results else messages[0]["result"]

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Give a message to every rank, and return those of all; rank 0 collects them."""
        self._num_barriers += 1
        key = self._round
        self.store.set(f"{key}/{self.launch.rank}", json.dumps(message))
        if self.launch.rank == 0:
            self.store.set(key, json.dumps(self._collect(key)))
        else:
            self._wait_for(key)
        try:
            messages = expect_maps(self.store.message(key), {"failed": (dict, type(None)), "result": object})
            if len(messages) != len(self.ranks):
                raise ValueError("it is not a message of every rank")
        except ValueError as error:
            raise self.store.misfit(key, error) from None
        return messages

    @property
    def _round(self) -> str:
        return f"{self.prefix}/round/{self._num_barriers}"

    def _collect(self, key: str) -> list[Any]:
        messages: dict[int, Any] = {}
        ranks = self.ranks
        waiter = self._waiter(lambda: [rank for rank in ranks if rank not in messages])
        while True:
            for rank in ranks:
                if rank not in messages and self.store.has(f"{key}/{rank}"):
                    messages[rank] = self.store.message(f"{key}/{rank}")
            if len(messages) == len(ranks):
                return [messages[rank] for rank in ranks]
            self._raise_failure()
            waiter.wait(_POLL_S)

    def publish_failure(self, report: ErrorReport) -> None:
        """Publish why this rank fails, once, with the order of its arrival."""
        self.store.invalidate()
        if self._has_failed or not self.prefix:
            return
        self._has_failed = True
        with contextlib.suppress(RuntimeError):  # the store's DistError: its host has exited
            arrival = self.store.add(f"{self.prefix}/count/reports", 1)
            self.publish(f"failed/{report.rank}", {"arrival": arrival, "words": asdict(report)})

    def failures(self) -> list[ErrorReport]:
        """Return the published failures, in the order of arrival."""
        if not self.store.add(f"{self.prefix}/count/reports", 0):
            return []
        published = self.read_any([f"failed/{rank}" for rank in self.ranks], within_s=0.0)
        messages = sorted(published.values(), key=lambda message: int(message["arrival"]))
        return [self._parse_report("failed", message["words"]) for message in messages]

    def ended_here(self) -> list[int]:
        """Return the ranks whose process was on this host and has ended, in whatever way."""
        return [rank for rank, process in self.processes_here().items() if not process.lives]

    def stopped_here(self, limit_s: Callable[[int], float]) -> int | None:
        """Return a rank whose process is on this host, and stopped by a signal for longer than its limit.

        Call it every half a second: longer pauses do not count, because this process was stopped itself.
        """
        now = time.monotonic()
        passed, self._counted_at = min(now - self._counted_at, 2 * _LOOK_S), now
        for rank, process in self.processes_here().items():
            self._stopped_s[rank] = self._stopped_s.get(rank, 0.0) + passed if process.state == "T" else 0.0
            if self._stopped_s[rank] > limit_s(rank):
                return rank
        return None

    def processes_here(self) -> dict[int, ProcessId]:
        """Return the processes of this host's ranks."""
        return {
            rank: ProcessId(process["pid"], process["started"])
            for rank, process in self.processes.items()
            if process["at"] == host_id()
        }

    def name_of(self, rank: int) -> str:
        """Return a rank with its process for messages."""
        process = self.processes[rank]
        return f"{self.launch.place_of(rank)} (pid {process['pid']} on {process['host']})"

    def _raise_failure(self) -> None:
        """Raise if another rank has failed, or its process has ended; checked twice a second."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        ended = self.ended_here()  # first: a process writes its report before it ends
        for report in self.failures():
            if report.rank == self.launch.rank:
                continue
            raise report.error(self.launch.place_of(report.rank)) if self.launch.rank == 0 else self.peer_error(report)
        stopped = self.stopped_here(lambda _rank: self._stopped_limit_s)
        if stopped is not None:
            pid = self.processes[stopped]["pid"]
            state = (
                f"is stopped by a signal (state T), before the training began. To let it continue: kill -CONT {pid}."
            )
            raise HangError(f"{self.name_of(stopped)} {state}")
        for rank in ended:
            raise HangError(f"{self.name_of(rank)} has ended without an error report, before the training began.")

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value to the other processes of this group."""
        self.store.set(f"{self.prefix}/{key}", json.dumps(value))

    def read_any(self, keys: Iterable[str], *, within_s: float) -> dict[str, Any]:
        """Return the published values of `keys` as soon as there is one; empty after `within_s`, or if the store is
        lost.
        """
        names = {key: f"{self.prefix}/{key}" for key in keys}
        deadline = time.monotonic() + within_s
        try:
            while True:
                values = {key: self.store.message(name) for key, name in names.items() if self.store.has(name)}
                if values or time.monotonic() > deadline:
                    return values
                time.sleep(_POLL_S)
        except RuntimeError:  # the store's DistError: its host has exited
            return {}

    def peer_error(self, report: ErrorReport) -> PeerError:
        """Return the error with which this rank ends because another failed; rank 0 reports the details."""
        return PeerError(
            f"rank {self.launch.rank} ends with rank {report.rank}: {report.summary}", exit_code=report.exit_code
        )

    def _parse_report(self, key: str, content: Mapping[str, Any]) -> ErrorReport:
        try:
            return report_from_json(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self.store.misfit(key, ValueError("it is not a report of a failure")) from None

    def _wait_for(self, key: str) -> None:
        """Wait for a value that rank 0 sets; rank 0 itself logs the ranks that it waits for."""
        waiter = self._waiter(lambda: [0], log=lambda _: None)
        try:
            while not self.store.has(key):
                self._raise_failure()
                waiter.wait(_POLL_S)
        except RuntimeError as error:  # the store's DistError
            raise HangError(f"{self.launch.place_of(0)} cannot be reached any more, nor can the store.") from error

    def _waiter(
        self, missing: Callable[[], Iterable[int]], *, log: Callable[[str], None] | None = None
    ) -> WaitReporter:
        return WaitReporter(
            lambda: ", ".join(self.launch.place_of(rank) for rank in sorted(missing())),
            timeout_s=self._timeout_s,
            log=log or self._log,
        )


_OWN_KEYS: Final = (("cluster", "task"),)
"""Keys that differ between the processes of a launch by design."""


_ALIKE: Final = ("trainkit", "torch")
"""Packages whose versions must not differ between the processes of a launch, but for their builds."""


def values_of(cfg: RunConfig) -> dict[str, Any]:
    """Return what processes compare of a config, as JSON: its values, and the versions that give them a meaning."""
    installed = packages({})
    versions = {f"version of {name}": installed[name].partition("+")[0] for name in _ALIKE if name in installed}
    return {**{dotted(path): value for path, value in leaves(cfg.to_dict()) if path not in _OWN_KEYS}, **versions}


def facts_of_plan(plan: RunPlan, num_processes: int, rank: int) -> dict[str, Any]:
    """Return what processes compare of a plan: hosts whose devices or data differ would plan different runs."""
    ranks_per_process = len(plan.training_tasks) // num_processes
    splits = plan.components.datasets.items()
    return {
        "strategy, replicas a process": ranks_per_process,
        "strategy, device": plan.tasks[rank * ranks_per_process].device.partition(":")[0],
        "strategy, on MIG instances": bool(mig_instances(os.environ)),  # they exchange over another backend
        **{f"data, samples of {name}": size_of(split) for name, split in splits if hasattr(split, "__len__")},
    }


def mismatches(
    first: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    *,
    origin: str,
    remedy: str = "Start all with the same config.",
) -> list[Problem]:
    """Return one problem for each key in which processes differ."""
    return [
        Problem(key=key, value=first.get(key), rule=f"{name} has {yaml_text(values.get(key))}. {remedy}", origin=origin)
        for name, values in others.items()
        for key in sorted({**first, **values})
        if first.get(key) != values.get(key)
    ]


def refuse_mismatches(barrier: ProcessBarrier, values: Mapping[str, Any], **remedy: str) -> None:
    """Compare values of all processes; raise for each key and rank that differ, before anything is written."""
    gathered = barrier.all_gather_object(dict(values))
    first, *places = [barrier.launch.place_of(rank) for rank in barrier.ranks]
    problems = mismatches(gathered[0], dict(zip(places, gathered[1:], strict=True)), origin=first, **remedy)
    barrier.run_on_rank0(lambda: refuse(problems))
