"""Where the processes of a launch meet before they train: each finds the others, and none goes on alone.

The store is the launcher's, or one that rank 0 opens. Once all have arrived (`trainkit.run.rendezvous.handshake`),
everything is said in rounds: `first` (rank 0 does something, all learn what came of it) and `each` (all do something;
where one fails, all fail).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from trainkit.bounded_json import Kind, expect_map
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import HangError, PeerError
from trainkit.run.process.error_report import ErrorReport, error_report, report_from_json
from trainkit.run.rendezvous.handshake import accept_all, join
from trainkit.run.rendezvous.store_client import StoreClient
from trainkit.run.rendezvous.wait import WaitReporter

__all__ = ["ProcessBarrier"]

T = TypeVar("T")

_POLL_S: Final = 0.05
_GOODBYE_S: Final = 5.0
"""How long the store outlives the work of its rank; one that was killed says no goodbye."""


class ProcessBarrier:
    """The processes of a launch, while they are together.

    Args:
        launch: who takes part, and where they meet.
        timeout_s: how long to wait for another process.
        ranks: those that meet, where not all of the launch do.
        say: is told who is missing; by default a line on stderr.
    """

    def __init__(
        self,
        launch: LaunchEnvironment,
        *,
        timeout_s: float,
        ranks: Iterable[int] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.launch = launch
        self.ranks = tuple(range(launch.num_ranks) if ranks is None else ranks)
        """Those that meet, in order; rank 0 is one of them."""
        self.prefix = ""
        """What the keys of this group begin with in the store; another one for every group."""
        self._timeout_s = timeout_s
        self._say = say
        self._rounds = 0
        self._board = StoreClient(launch)
        self._stack = ExitStack()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return self._board.address

    def __enter__(self) -> Self:
        """Open or find the store, and wait until all are there."""
        with self._stack:
            self._board.open(self._stack, self._wait_limit_s(lambda: [0]))
            if self.launch.rank == 0:
                self.prefix = accept_all(self._board, self.launch.num_ranks, self.ranks, self._wait_limit_s)
            else:
                self.prefix = join(self._board, self.launch, self._stack, self._wait_limit_s(lambda: [0]))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self.prefix and not isinstance(error, KeyboardInterrupt):
                self._exit_barrier()
            self._board.close()

    def _exit_barrier(self) -> None:
        """Say goodbye; whoever has the store keeps it until all have, so that nobody misses the last word."""
        with contextlib.suppress(RuntimeError):  # the store's DistError: it is gone already
            left = self._board.add(f"{self.prefix}/left", 1)
            deadline = time.monotonic() + _GOODBYE_S
            while self.launch.hosts_store and left < len(self.ranks) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                left = self._board.add(f"{self.prefix}/left", 0)

    def run_on_rank0_and_broadcast(self, work: Callable[[], T]) -> T:
        """Let rank 0 do something and tell the others; collective.

        Args:
            work: what to do; its result is JSON.

        Returns:
            What it gave, on every rank.

        Raises:
            TrainkitError: it failed: on rank 0 as it was raised, on the others as a `PeerError`.
        """
        key = self._next_barrier_key()
        if self.launch.rank > 0:
            self._wait_for(key)
            told = self._message(key, {"failed": (dict, type(None)), "result": object})
            if told["failed"] is not None:
                raise self.peer_error(self._words(key, told["failed"]))
            shared: T = told["result"]
            return shared
        try:
            result = work()
        except Exception as error:
            self._board.set(key, json.dumps({"failed": asdict(error_report(0, error)), "result": None}))
            raise
        self._board.set(key, json.dumps({"failed": None, "result": result}))
        return result

    def run_everywhere(self, work: Callable[[], T]) -> T:
        """Do something on every rank, and go on only if it went well on all; collective.

        Returns:
            What it gave here.

        Raises:
            TrainkitError: it failed somewhere. Rank 0 raises the error of the lowest rank that failed as it was raised
                there, the others a `PeerError`.
        """
        key, error, result = self._next_barrier_key(), None, None
        try:
            result = work()
        except Exception as failed:  # noqa: BLE001 - raised below, when the others know
            error = failed
        words = None if error is None else asdict(error_report(self.launch.rank, error))
        self._board.set(f"{key}/{self.launch.rank}", json.dumps(words))
        failures = self.run_on_rank0_and_broadcast(lambda: [words for words in self._collect(key) if words is not None])
        if failures:
            culprit = self._words(key, failures[0])
            if self.launch.rank > 0:
                raise self.peer_error(culprit) from error
            raise error if error is not None else culprit.error(self.launch.place_of(culprit.rank))
        return result  # type: ignore[return-value]  # it did not fail

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; JSON; collective."""
        key = self._next_barrier_key()
        self._board.set(f"{key}/{self.launch.rank}", json.dumps(value))
        return self.run_on_rank0_and_broadcast(lambda: self._collect(key))

    def _collect(self, key: str) -> list[Any]:
        found: dict[int, Any] = {}
        everyone = self.ranks
        patience = self._wait_limit_s(lambda: [rank for rank in everyone if rank not in found])
        while True:
            for rank in everyone:
                if rank not in found and self._board.has(f"{key}/{rank}"):
                    found[rank] = self._board.message(f"{key}/{rank}")
            if len(found) == len(everyone):
                return [found[rank] for rank in everyone]
            patience.wait(_POLL_S)

    def publish(self, key: str, value: Any) -> None:
        """Leave a word for the others; JSON."""
        self._board.set(f"{self.prefix}/{key}", json.dumps(value))

    def count(self, key: str) -> int:
        """Add 1 to a counter of this group, and return what it is then: the order in which processes came here."""
        return self._board.add(f"{self.prefix}/count/{key}", 1)

    def read_any(self, keys: Iterable[str], *, within_s: float) -> dict[str, Any]:
        """Words that were left for us, as soon as there is one; none where they come too late or the store is gone."""
        names = {key: f"{self.prefix}/{key}" for key in keys}
        deadline = time.monotonic() + within_s
        try:
            while True:
                found = {key: self._board.message(name) for key, name in names.items() if self._board.has(name)}
                if found or time.monotonic() > deadline:
                    return found
                time.sleep(_POLL_S)
        except RuntimeError:  # the store's DistError: who held it is gone
            return {}

    def store_for_relaunch(self, key: str, value: str) -> None:
        """Leave a word for the groups that come after this one; lost where the store ends with this group."""
        self._board.set(f"trainkit/{key}", value)

    def publish_global(self, name: str, value: str) -> None:
        """Leave a word for those of the launch that do not meet; under its bare name, which they know beforehand."""
        self._board.set(name, value)

    def load_from_previous(self, key: str) -> str | None:
        """What an earlier group of this launch left; None where there was none, or its store is gone."""
        name = f"trainkit/{key}"
        return self._board.get(name).decode(errors="replace") if self._board.has(name) else None

    def mark_store_suspect(self) -> None:
        """Something has failed: the store may be out of reach."""
        self._board.invalidate()

    def peer_error(self, words: ErrorReport) -> PeerError:
        """That this rank ends because another failed; the whole story is told by rank 0."""
        return PeerError(
            f"rank {self.launch.rank} ends with rank {words.rank}: {words.summary}", exit_code=words.exit_code
        )

    def _next_barrier_key(self) -> str:
        self._rounds += 1
        return f"{self.prefix}/round/{self._rounds}"

    def _message(self, key: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
        try:
            return expect_map(self._board.message(key), kinds)
        except ValueError as error:
            raise self._board.misfit(key, error) from None

    def _words(self, key: str, content: Mapping[str, Any]) -> ErrorReport:
        try:
            return report_from_json(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._board.misfit(key, ValueError("it is no report of a failure")) from None

    def _wait_for(self, key: str) -> None:
        """A value that rank 0 sets, which is there and busy; whom it waits for, it says itself."""
        patience = self._wait_limit_s(lambda: [0], say=_nothing)
        try:
            while not self._board.has(key):
                patience.wait(_POLL_S)
        except RuntimeError as error:  # the store's DistError
            raise HangError(f"{self.launch.place_of(0)} is gone, and with it the store.") from error

    def _wait_limit_s(
        self, missing: Callable[[], Iterable[int]], *, say: Callable[[str], None] | None = None
    ) -> WaitReporter:
        return WaitReporter(
            lambda: ", ".join(self.launch.place_of(rank) for rank in sorted(missing())),
            timeout_s=self._timeout_s,
            say=say or self._say,
        )


def _nothing(line: str) -> None:
    del line
