"""Runs the jobs of a sweep side by side, as many as there are slots; none is left behind, whatever happens.

    while there are jobs    start those that fit into the free slots
                            wait for an end, a signal, or half a second
        a job ended         done, or tried again from its checkpoint, or failed: its slots are free
        Ctrl-C, SIGTERM     no further starts; the jobs save and stop; at the second they end now
        half a second       look how far the jobs are, and whether the search wants to stop one

Tested on Linux only.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final, Literal

from trainkit.errors import ConfigError, DataError, StoppedError, TerminatedError, TrainkitError
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited
from trainkit.run.lock import locked
from trainkit.sweeps.jobs import Job, Source
from trainkit.sweeps.leaderboard import collect, write
from trainkit.sweeps.processes import JobProcess, Starter, start_fresh
from trainkit.sweeps.progress import Watch, last_line
from trainkit.sweeps.record import Record, is_complete
from trainkit.sweeps.screen import Line, Screen, State, View, screen_for
from trainkit.sweeps.slots import Grant, Slots

__all__ = ["LOG", "Sweep"]

LOG: Final = "output.log"
"""What a job prints, in its folder."""

_LOOK_S: Final = 0.5
_GRACE_S: Final = 3.0
"""How long jobs have to end after a second Ctrl-C."""
_MOST_SIGNALS: Final = 2
_STOPPED: Final = (StoppedError.exit_code, TerminatedError.exit_code)
_NOT_TRIED_AGAIN: Final = (0, ConfigError.exit_code, DataError.exit_code, StoppedError.exit_code)
"""What would end the same way, and what a person wanted."""


@dataclass(kw_only=True)
class _Running:
    job: Job
    process: JobProcess
    grant: Grant
    line: Line
    watch: Watch
    begun: float
    twins: list[Job] = field(default_factory=list)
    """The same job, asked for again while it runs."""
    stopped_by_search: bool = False


class Sweep:
    """The jobs of one folder and what became of them.

    `sweep.json`, `leaderboard.md` and `leaderboard.csv` in its folder are right after every job.

    Args:
        folder: of the sweep; that of an earlier one is gone on with.
        slots: where jobs run; one where nothing is said.
        retries: how often a job that fails is tried again, from its checkpoint.
        on_error: what a job that failed means for the others: nothing, or that they are stopped.
        start: starts a job's process.
        screen: makes what shows the sweep, once it begins.
    """

    def __init__(
        self,
        *,
        folder: Path,
        slots: Slots | None = None,
        retries: int = 0,
        on_error: Literal["continue", "stop"] = "continue",
        start: Starter = start_fresh,
        screen: Callable[[], Screen] = screen_for,
        command: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.slots = slots or Slots(count=1)
        self.record = Record.read(folder, command=command)
        self.asked: set[str] = set()
        """Names of the jobs of this sweep, without those of an earlier one in its folder."""
        self.halted = False
        """Whether a failure has ended it."""
        self.retries, self.on_error, self.start = retries, on_error, start
        self._make_screen = screen

    @property
    def exit_codes(self) -> dict[str, int]:
        """By name of the job; without those that have not ended."""
        return {name: row.exit_code for name, row in self.record.rows.items() if row.exit_code is not None}

    def run(self, source: Source) -> None:
        """Run all jobs of a source; one that fails does not keep the others from running, unless that is asked for.

        Each is a session of its own, so that a signal reaches it through this process only, and it ends with this
        process, also where that is killed.

        Raises:
            StoppedError: Ctrl-C; jobs that ran were stopped in good order, the others were not started.
            TerminatedError: the same by SIGTERM.
            ConfigError: another sweep runs in this folder.
        """
        if self.halted:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".lock"), contextlib.closing(self._make_screen()) as screen:
            round_ = _Round(self, source, screen)
            try:
                round_.run()
            finally:
                round_.end_all()
        self.halted = round_.failed is not None
        if round_.signals:
            self._refuse(round_.signals[0], source)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Take note of jobs that are to come, so that those that are not run are told of too."""
        for job in jobs:
            self.record.add(job)
            self.asked.add(job.name)

    def note(self) -> None:
        """Write what is known by now."""
        self.record.write()
        write(collect(self.folder), self.folder, picture=False)

    def finish(self) -> None:
        """Write the leaderboard with its picture, and print it."""
        self.record.forget_others(self.asked)
        self.record.write()
        board = collect(self.folder)
        write(board, self.folder)
        rows = self.record.rows.values()
        codes = [row.exit_code for row in rows if row.exit_code is not None and not row.pruned]
        stopped = sum(code in _STOPPED for code in codes)
        counts = {
            "failed": len(codes) - stopped - codes.count(0),
            "stopped": stopped,
            "pruned": sum(row.pruned for row in rows),
            "not run": sum(row.exit_code is None for row in rows),
        }
        head = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
        told = [head, *(f"{number} {what}" for what, number in counts.items() if number), f"by {board.goal}"]
        _say(f"\n{', '.join(told)}")
        for line in board.lines():
            _say(f"  {line}")
        _say(f"  leaderboard  {self.folder / 'leaderboard.md'}")

    def _refuse(self, number: int, source: Source) -> None:
        """End the sweep early, as the signal asked."""
        ended = len(self.asked & self.exit_codes.keys())
        known = f" of {source.total}" if source.total is not None else ""
        text = f"the sweep was stopped: {ended}{known} jobs were started. The same command goes on: "
        text += f"sweep.resume={self.folder}"
        raise StoppedError(text) if number == signal.SIGINT else TerminatedError(text)


class _Round:
    """One call of `Sweep.run`."""

    def __init__(self, sweep: Sweep, source: Source, screen: Screen) -> None:
        self._sweep, self._source, self._screen = sweep, source, screen
        self._news: SimpleQueue[Exited | int] = SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._waiting: Job | None = None
        self._lines: dict[str, Line] = {}
        self._tries: dict[str, int] = {}
        self._number = 0
        self._kill_at = float("inf")
        self._look_at = 0.0
        self.signals: list[int] = []
        self.failed: Job | None = None

    def run(self) -> None:
        with _signals_to(self._news):
            while True:
                if not self.signals and self.failed is None:
                    self._fill()
                self._show()
                if not self._running:
                    break
                self._take()
                self._look()

    def end_all(self) -> None:
        for one in self._running.values():
            one.process.kill()

    # --- starting

    def _fill(self) -> None:
        """Start what fits; the first that does not fit waits, and the others behind it."""
        while True:
            job = self._waiting or self._source.next()
            self._waiting = None
            if job is None:
                if not self._running and not self._source.exhausted:
                    raise TrainkitError("the search gives no job, waits for none, and says that it has not ended")
                return
            if self._need_not_run(job):
                continue
            if job.slots > self._sweep.slots.free:
                self._waiting = job
                return
            self._begin(job)

    def _need_not_run(self, job: Job) -> bool:
        """Whether its result is there, or being made."""
        sweep = self._sweep
        twin = next((one for one in self._running.values() if one.job.name == job.name), None)
        if twin is not None:
            twin.twins.append(job)
            return True
        row = sweep.record.add(job)
        known = job.name in self._lines
        sweep.asked.add(job.name)
        if not job.config or not is_complete(row):
            row.exit_code, row.pruned = None, False
            return False
        row.exit_code = 0
        sweep.note()
        if not known:
            self._screen.say(f"{_named(job)}: has its result already, in {job.folder}")
            self._lines[job.name] = Line(
                name=job.name, label=job.label, state="done", progress=Watch(job.folder).look()
            )
        self._source.ended(job, 0)
        return True

    def _begin(self, job: Job) -> None:
        grant = self._sweep.slots.take(job.slots)
        line = Line(name=job.name, label=job.label)
        tries = self._tries[job.name] = self._tries.get(job.name, 0) + 1
        row = self._sweep.record.rows[job.name]
        if not row.tries:
            RunFolder(job.folder).result.unlink(missing_ok=True)  # of another config, a shorter rung
        row.tries += 1
        self._number += 1
        goes_on = (job.folder / "resolved.yaml").is_file()
        if not goes_on:
            # Of a job that was killed before it began: its run would take the folder for another's.
            (job.folder / ".lock").unlink(missing_ok=True)
        again = goes_on and not any(word.startswith("resume=") for word in job.overrides)
        command = (*job.command, "resume=auto") if again else job.command
        try:
            process = self._sweep.start(self._number, command, grant.environ, job.folder / LOG, self._news.put)
        except BaseException:
            self._sweep.slots.give_back(grant)
            raise
        self._running[self._number] = _Running(
            job=job, process=process, grant=grant, line=line, watch=Watch(job.folder), begun=time.monotonic()
        )
        self._lines.pop(job.name, None)
        self._lines[job.name] = line
        what = "starts" if not goes_on else "goes on" if tries == 1 else f"goes on, try {tries}"
        self._screen.say(f"{_named(job)} {what}", passing=True)
        self._sweep.note()

    # --- waiting

    def _take(self) -> None:
        """Wait for something to happen, and see to it."""
        try:
            event = self._news.get(timeout=_LOOK_S)
        except Empty:
            return
        if not isinstance(event, Exited):
            self._pass_on(event)
        elif (one := self._running.pop(event.attempt, None)) is not None:
            one.process.kill()
            self._sweep.slots.give_back(one.grant)
            self._end(one, event.code)

    def _look(self) -> None:
        """Look after the jobs that run, now and then."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if now >= self._kill_at:
            self.end_all()
        for one in list(self._running.values()):
            one.line.progress = one.watch.look()
            if not one.stopped_by_search and not self.signals and self._source.watch(one.job):
                one.stopped_by_search = True
                one.process.signal(signal.SIGINT)

    def _pass_on(self, number: int) -> None:
        self.signals.append(number)
        if len(self.signals) > _MOST_SIGNALS:
            self.end_all()
        else:
            self._stop_all(signal.Signals(number))
        if len(self.signals) == _MOST_SIGNALS:
            self._kill_at = time.monotonic() + _GRACE_S
        elif len(self.signals) == 1:
            self._screen.say(f"stopping: {len(self._running)} running, each saves first; once more ends them now")

    def _stop_all(self, number: signal.Signals) -> None:
        for one in self._running.values():
            one.process.signal(number)

    # --- ending

    def _end(self, one: _Running, code: int) -> None:
        job, row = one.job, self._sweep.record.rows[one.job.name]
        one.line.seconds = time.monotonic() - one.begun
        one.line.progress = one.watch.look()
        pruned = one.stopped_by_search and code in _STOPPED
        if self._is_tried_again(job, code, pruned=pruned):
            self._screen.say(f"{_named(job)}: {_died(code)}; tried again")
            self._waiting_again(one)
            return
        row.exit_code, row.pruned = code, pruned
        state: State = "done" if code == 0 else "pruned" if pruned else "stopped" if code in _STOPPED else "failed"
        one.line.state = state
        self._sweep.note()
        self._screen.say(self._told(one, code, state))
        if state == "failed" and self._sweep.on_error == "stop" and self.failed is None:
            self.failed = job
            self._screen.say(f"stopping: {len(self._running)} running, each saves first (sweep.on_error=stop)")
            self._stop_all(signal.SIGINT)
        for twin in (job, *one.twins):
            self._source.ended(twin, code)

    def _is_tried_again(self, job: Job, code: int, *, pruned: bool) -> bool:
        may = not self.signals and not pruned and code not in _NOT_TRIED_AGAIN
        return may and self._tries[job.name] <= self._sweep.retries

    def _waiting_again(self, one: _Running) -> None:
        """Start it at once: its slots are free, and it goes before those that have not begun."""
        self._begin(one.job)
        self._running[self._number].twins = one.twins

    def _told(self, one: _Running, code: int, state: State) -> str:
        seconds = f"{one.line.seconds or 0.0:.1f} s"
        metric = one.line.progress.metric
        if state == "done":
            found = "" if metric is None else f", {metric:.4g}"
            return f"{_named(one.job)} done{found}, {seconds}"
        if state != "failed":
            return f"{_named(one.job)} {state}, {seconds}"
        log = one.job.folder / LOG
        said = last_line(log)
        return f"{_named(one.job)} failed: {_died(code)}{f', {said}' if said else ''} ({log})"

    def _show(self) -> None:
        total = self._source.total
        queued = None if total is None else max(0, total - len(self._lines))
        slots = self._sweep.slots
        self._screen.show(View(lines=list(self._lines.values()), queued=queued, in_use=slots.in_use, slots=slots.total))


def _named(job: Job) -> str:
    return f"job {job.name} ({job.label})" if job.label else f"job {job.name}"


def _died(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def _signals_to(news: SimpleQueue[Exited | int]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into news while the block runs; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, frame: FrameType | None) -> None:
        del frame
        news.put(number)  # all that a handler may do: the put of a SimpleQueue is reentrant

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the user's screen
