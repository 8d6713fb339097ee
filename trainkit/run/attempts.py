"""An attempt at a run: every rank started in a process of its own, and watched until all have ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Final

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.run.environment import worker_environ
from trainkit.run.failure import Failure, culprit, hung
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited, WorkerGroup
from trainkit.run.heartbeat import read_pulse
from trainkit.run.last_words import read_last_words
from trainkit.run.rendezvous import Rendezvous
from trainkit.run.roster import Roster
from trainkit.run.secrets import VARIABLE as SECRETS
from trainkit.run.stopping import EXIT_CODES, Reason, StopFlag

__all__ = ["Attempts"]

_CLEAN: Final = frozenset(EXIT_CODES.values())
_LOOK_S: Final = 0.5
"""Seconds between two looks at the pulses of the ranks, and at whether a lost replica is due."""
_GRACE_S: Final = 0.1
"""How long the others have to say their last words once one has failed."""
_GRACE_AFTER_LOSS_S: Final = 1.0
"""The same where the one only says that it lost another: who fails first may well be the last to end."""


class Attempts:
    """Starts the ranks of a run as often as it takes.

    Args:
        roster: who takes part.
        folder: the run folder.
        command: what to start, the same for every rank.
        meeting: the store the ranks meet at.
        hang_timeout_s: seconds without a heartbeat after which a rank counts as hanging.
        pass_fds: descriptors that every worker inherits.
        secrets: what the workers need and no file holds.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        folder: RunFolder,
        command: Sequence[str],
        meeting: Rendezvous,
        hang_timeout_s: float,
        pass_fds: Sequence[int],
        secrets: Mapping[str, str],
    ) -> None:
        self._roster = roster
        self._folder = folder
        self._command = command
        self._meeting = meeting
        self._hang_timeout_s = hang_timeout_s
        self._pass_fds = pass_fds
        self._environ = {**os.environ, **({SECRETS: json.dumps(secrets)} if secrets else {})}
        self._token = token_hex(32)
        self._asked_to_resize = False
        self.events: queue.SimpleQueue[Exited | Reason] = queue.SimpleQueue()  # its put is safe in a signal handler
        self.stop = StopFlag()

    def run(self, attempt: int, *, continues_at: int | None) -> Failure | None:
        """Start all ranks and watch them until all have ended; returns the first failure.

        Args:
            attempt: its number, from 0.
            continues_at: the step of the checkpoint that it goes on from; None: from the start.
        """
        self._folder.begin()
        self._folder.live.mkdir(parents=True)
        self._asked_to_resize = False
        started = time.monotonic()
        tasks = self._roster.tasks
        with WorkerGroup(attempt, self.events.put, pass_fds=self._pass_fds) as group:
            for task in tasks:
                self._start(group, task, len(tasks), attempt)
            self._meeting.open()
            return self._watch(group, attempt, started, continues_at)

    def _start(self, group: WorkerGroup, task: Task, num_ranks: int, attempt: int) -> None:
        identity = Identity(
            task=task,
            num_ranks=num_ranks,
            store=self._meeting.address,
            prefix=f"attempt/{attempt}",
            attempt=attempt,
            token=self._token,
        )
        environ = worker_environ(self._environ, identity)
        log = self._folder.log_of(task.rank) if task.rank > 0 else None
        group.start(task.rank, self._command, environ, log)

    def _watch(self, group: WorkerGroup, attempt: int, started: float, continues_at: int | None) -> Failure | None:
        if self.stop.requested:  # between two attempts
            self._ask_to_stop(group, self.stop.requested)
        while group.running:
            event = self._next_event(min(_LOOK_S, self._hang_timeout_s / 4))
            if event is None:
                failure = hung(
                    self._folder,
                    group.running,
                    now=time.monotonic(),
                    started=started,
                    timeout_s=self._hang_timeout_s,
                )
                if failure is not None:
                    return self._with_stacks(group, failure)
                self._make_room(group, continues_at)
            elif not isinstance(event, Exited):
                self._ask_to_stop(group, event)
            elif event.attempt == attempt and event.code not in _CLEAN:
                return self._diagnose(group, attempt, event)
        return self._late_failure(group, attempt)

    def has_begun(self, rank: int, continues_at: int | None) -> bool:
        """Whether a rank of the current or last attempt has done a step in it."""
        pulse = read_pulse(self._folder.heartbeat_of(rank))
        return pulse is not None and pulse.step > (continues_at or 0)

    def _make_room(self, group: WorkerGroup, continues_at: int | None) -> None:
        """Ask a group that trains to save and end, once, where a lost replica is due: the next is started with it."""
        if self._roster.is_due and not self._asked_to_resize and self.has_begun(0, continues_at):
            self._asked_to_resize = True
            if hasattr(signal, "SIGHUP"):  # elsewhere it waits for a failure
                group.signal(signal.SIGHUP)

    def _next_event(self, timeout_s: float) -> Exited | Reason | None:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _late_failure(self, group: WorkerGroup, attempt: int) -> Failure | None:
        """The exit that was reported after the last look."""
        while (event := self._next_event(0)) is not None:
            if isinstance(event, Exited) and event.attempt == attempt and event.code not in _CLEAN:
                return self._diagnose(group, attempt, event)
        return None

    def _ask_to_stop(self, group: WorkerGroup, reason: Reason) -> None:
        group.signal(signal.SIGINT if reason == "stopped" else signal.SIGTERM)

    def _diagnose(self, group: WorkerGroup, attempt: int, first: Exited) -> Failure:
        words = read_last_words(self._folder.error_of(first.rank))
        grace_s = _GRACE_AFTER_LOSS_S if words is not None and words.aftermath else _GRACE_S
        exits, deadline = [first], time.monotonic() + grace_s
        while group.running and (left := deadline - time.monotonic()) > 0:
            event = self._next_event(left)
            if isinstance(event, Exited) and event.attempt == attempt and event.code not in _CLEAN:
                exits.append(event)
        return culprit(self._folder, exits, group.running)

    def _with_stacks(self, group: WorkerGroup, failure: Failure) -> Failure:
        """Ask the hanging rank what its threads are doing; one that is stopped cannot tell."""
        if not hasattr(signal, "SIGUSR2"):
            return failure
        group.signal(signal.SIGUSR2)
        time.sleep(0.3)
        try:
            stacks = self._folder.stacks_of(failure.rank).read_text(errors="replace").strip()
        except OSError:
            stacks = ""
        detail = f"What its threads were doing:\n{stacks}" if stacks else ""
        return Failure(rank=failure.rank, headline=failure.headline, detail=detail, hang=True)
