"""Run the jobs of a sweep in parallel, as many as slots exist; no process keeps running, even after errors.

    while there are jobs    start the jobs that fit into the free slots
                            wait for an exit, a signal, or half a second
        a job exited        done, retried from its checkpoint, or failed: its slots are free
        Ctrl-C, SIGTERM,    start no more jobs; running jobs save and stop; a second Ctrl-C or SIGTERM kills them
        SIGHUP
        half a second       read the progress of the jobs, and stop the jobs that the search gives up

A job takes slots, the GPUs or cores of this machine, and runs in a session of its own: signals reach it through this
process only, and it ends with this process, even if this process is killed. Tested on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final, Literal, Protocol

from trainkit.cluster.host import MEMORY_SHARE, VISIBLE, mig_instances
from trainkit.config.commands import shell_word
from trainkit.config.grammar import setting
from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import SweepConfig as Settings
from trainkit.errors import ConfigError, DataError, HangupError, Problem, StoppedError, TerminatedError
from trainkit.files import reporting
from trainkit.report.numbers import figure
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.signals import is_ignored, stop_error, stop_signals
from trainkit.sweeps.budget import Budget
from trainkit.sweeps.job_sources import JobSource, SweepJob, continued
from trainkit.sweeps.results.comparing import page_at_end
from trainkit.sweeps.results.job_results import SweepState, config_of, is_complete, last_line
from trainkit.sweeps.results.leaderboard import collect, write
from trainkit.sweeps.screen import TERSE, JobLine, Screen, State, View, print_line, screen_for
from trainkit.trainer.ownership import locked
from trainkit.watching.board import watched


class JobProcess(Protocol):
    """A running job."""

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, but not its children."""

    def kill(self) -> None:
        """Kill the process and all its children, and wait until they have exited; no effect if it has exited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """The parameters for starting the process of a job."""

    number: int
    """The number passed to `report`, as the attempt."""
    command: Sequence[str]
    """The command to start."""
    environ: Mapping[str, str]
    """Environment variables in addition to those of this process."""
    log: Path
    """The file for the output."""
    report: Callable[[ProcessExit], None]
    """Called when the process exits, in another thread."""
    slots: int = 1
    """Number of processes of the job."""


Starter = Callable[[JobCommand], JobProcess]
"""Starts the processes of jobs."""


def start_fresh(job: JobCommand) -> JobProcess:
    """Start a new interpreter for a job."""
    return started_in(WorkerGroup(job.number, job.report), job)


def started_in(group: WorkerGroup, job: JobCommand) -> JobProcess:
    """Start the process of a job as the only one of a group."""
    # Unbuffered, so that a job that is killed keeps its output.
    group.start(0, job.command, {**os.environ, "PYTHONUNBUFFERED": "1", **job.environ}, job.log)
    return group


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED: Final = (
    *(kind.exit_code for kind in (StoppedError, TerminatedError, HangupError)),
    *(-number for number in _ENDING),
)
"""Exit codes of a job that was asked to stop."""
NOT_TRIED_AGAIN: Final = (0, ConfigError.exit_code, DataError.exit_code, StoppedError.exit_code, -signal.SIGINT)
"""Exit codes of jobs that are not retried: a retry would end the same way, or the user stopped the job."""


def died(code: int) -> str:
    """Return a description of how a failed job ended.

    Example:
        >>> died(1), died(-9)
        ('exit 1', 'signal 9')
    """
    return f"exit {code}" if code >= 0 else f"signal {-code}"


@contextlib.contextmanager
def signals_to(take: Callable[[int], None]) -> Iterator[None]:
    """Forward Ctrl-C, SIGTERM and SIGHUP while the block runs, in the main thread only. A SIGHUP ignored before stays
    so.

    Args:
        take: called in a signal handler: it may only do reentrant operations, such as the put of a SimpleQueue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        take(number)

    before = {number: signal.signal(number, handle) for number in _ENDING if not is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_THREADS: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLease:
    """The slots assigned to one job."""

    devices: tuple[int, ...]
    """Numbers of the devices."""
    environ: Mapping[str, str]
    """Environment variables that make these devices visible to the job, and no others."""


@dataclass(kw_only=True)
class Slots:
    """Assigns slots to jobs, and takes them back: the named GPUs, or shares of the cores.

    Cores are not pinned: two sweeps on one machine would pin their jobs to the same cores. The number of threads limits
    each process of a job to its share.

    Example:
        >>> slots = Slots(gpus=["0", "1", "2"], count=3, num_threads=4)
        >>> slots.take(2).environ["CUDA_VISIBLE_DEVICES"], slots.take(1).devices, slots.free
        ('0,1', (2,), 0)
    """

    count: int
    """Number of devices: the largest number of slots of one job."""
    gpus: Sequence[str] = ()
    jobs_per_device: int = 1
    num_threads: int | None = None
    key: str = "sweep.slots"
    """The key that sets the number."""

    def __post_init__(self) -> None:
        self.gpus = tuple(self.gpus)[: self.count]
        self._room = [self.jobs_per_device] * self.count

    @classmethod
    def here(cls, settings: Settings) -> Slots:
        """Return the slots of this machine that the config requests; asks torch for GPUs.

        Raises:
            ConfigError: as in `of`.
        """
        from trainkit.cluster.host import count_gpus, num_cores  # noqa: PLC0415 - imports torch

        return cls.of(settings, num_gpus=count_gpus(), num_cores=num_cores(), environ=os.environ)

    @classmethod
    def of(cls, settings: Settings, *, num_gpus: int, num_cores: int, environ: Mapping[str, str]) -> Slots:
        """Return the slots of this machine that the config requests.

        Raises:
            ConfigError: more slots than the machine has, or an option without effect here.
        """
        count: int = 0 if settings.slots == "auto" else settings.slots
        text = environ.get(_THREADS, "")
        threads = int(text) if text.isdecimal() and int(text) else None
        problems = []
        if num_gpus and count > num_gpus:
            shown = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
            rule = f"this machine has {shown}. Use {num_gpus} or less; jobs share a GPU with sweep.jobs_per_device."
            problems.append(Problem(key="sweep.slots", value=count, rule=rule))
        if not num_gpus and settings.jobs_per_device != 1:
            rule = "has no effect: there is no GPU here to share. Give sweep.slots, the number of parallel jobs."
            problems.append(Problem(key="sweep.jobs_per_device", value=settings.jobs_per_device, rule=rule))
        if problems:
            raise ConfigError(problems)
        count = count or num_gpus or max(1, num_cores // (threads or 1))
        share = threads or max(1, num_cores // (count * settings.jobs_per_device))
        names = [name for name in mig_instances(environ) or map(str.strip, environ.get(VISIBLE, "").split(",")) if name]
        gpus = names[:num_gpus] if names else list(map(str, range(num_gpus)))
        return cls(count=count, gpus=gpus, jobs_per_device=settings.jobs_per_device, num_threads=share)

    @property
    def total(self) -> int:
        """Number of single-slot jobs that fit."""
        return self.count * self.jobs_per_device

    @property
    def in_use(self) -> int:
        """Number of these slots that are taken."""
        return self.total - sum(self._room)

    @property
    def free(self) -> int:
        """Largest number of slots that a job can get now."""
        return sum(room > 0 for room in self._room)

    @property
    def on_gpus(self) -> bool:
        """Whether slots are GPUs."""
        return bool(self.gpus)

    @property
    def threads(self) -> Mapping[str, str]:
        """The environment variable that sets the number of threads of a process."""
        return {} if self.num_threads is None else {_THREADS: str(self.num_threads)}

    def take(self, count: int) -> SlotLease:
        """Assign slots to a job, on the devices with the most free slots.

        Raises:
            ValueError: there are not enough free slots.
        """
        if count > self.free:
            raise ValueError(f"{count} slots are requested, and {self.free} are free")
        roomiest = sorted(range(self.count), key=lambda device: -self._room[device])[:count]
        devices = tuple(sorted(roomiest))
        for device in devices:
            self._room[device] -= 1
        names = ",".join(self.gpus[device] for device in devices) if self.gpus else None
        shared = {MEMORY_SHARE: str(1 / self.jobs_per_device)} if names is not None and self.jobs_per_device > 1 else {}
        return SlotLease(
            devices=devices, environ={**self.threads, **({} if names is None else {VISIBLE: names}), **shared}
        )

    def give_back(self, lease: SlotLease) -> None:
        """Take the slots of an ended job back."""
        for device in lease.devices:
            self._room[device] += 1

    def problems(self, label: str, count: int) -> list[Problem]:
        """Return the problem of a job that needs more slots than exist."""
        if count <= self.count:
            return []
        noun = "GPUs" if self.on_gpus else "slots"
        rule = f"{label or 'a job'} takes {count} {noun}. Give it fewer, or {self.key}={count} or more."
        return [Problem(key=self.key, value=self.count, rule=rule)]


LOG: Final = "output.log"
"""The file for the output of a job, in its folder."""

_POLL_S: Final = 0.5
_WRITE_S: Final = 10.0
"""Time between two records of what a sweep with a budget has used."""
_GRACE_S: Final = 3.0
"""Time for jobs to exit after a second Ctrl-C."""
_MOST_SIGNALS: Final = 2


@dataclass(kw_only=True)
class _Running:
    job: SweepJob
    process: JobProcess
    lease: SlotLease
    line: JobLine
    begun: float
    duplicates: list[SweepJob] = field(default_factory=list)
    """Identical jobs that were requested while this one runs."""
    stopped_by_search: bool = False


class Sweep:
    """The jobs of one folder and their results; an earlier sweep in the folder is continued.

    `sweep.json`, `leaderboard.md` and `leaderboard.csv` in the folder are updated after every job, and
    `report.html` is written at the end.
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
        budget: Budget | None = None,
    ) -> None:
        self.folder, self.budget = folder, budget
        self.slots = slots or Slots(count=1)
        self.record = SweepState.read(folder, command=command, budget=None if budget is None else budget.text)
        self.requested: set[str] = set()
        """Names of the jobs of this sweep, without those of an earlier one in its folder."""
        self.halted = False
        """Whether a failure, or its budget, has ended the sweep."""
        self.retries, self.on_error, self.start = retries, on_error, start
        self._make_screen = screen

    @property
    def exit_codes(self) -> dict[str, int]:
        """Name of the job -> exit code, for the jobs that have ended."""
        return {name: row.exit_code for name, row in self.record.rows.items() if row.exit_code is not None}

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.budget is not None and self.budget.share(**self.record.spent) >= 1

    def run(self, source: JobSource) -> None:
        """Run all jobs of a source; after a failure the other jobs continue, unless `on_error` is `stop`.

        Each job has its own session: signals reach it through this process only, and it ends with this process, even if
        this process is killed.

        Raises:
            StoppedError: Ctrl-C; running jobs were stopped gracefully, the others were not started.
            TerminatedError: the same, by SIGTERM.
            HangupError: the same, by SIGHUP.
            ConfigError: another sweep runs in this folder.
            StorageError: the sweep's own files cannot be written; its jobs are ended, and `sweep.json` has the state
                after the last job that ended before.
        """
        if self.halted:
            return
        with reporting(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock"), contextlib.closing(self._make_screen()) as screen:
                loop = SweepLoop(self, source, screen)
                try:
                    loop.run()
                finally:
                    loop.end_all()
        self.halted = loop.failed is not None or self.is_spent
        if loop.signals:
            ended = len(self.requested & self.exit_codes.keys())
            of_total = f" of {source.total}" if source.total is not None else ""
            text = f"the sweep was stopped: {ended}{of_total} jobs were started. The same command resumes it with "
            text += shell_word(setting("sweep.resume", self.folder))
            raise stop_error(stop_signals()[signal.Signals(loop.signals[0])], text)

    def expect(self, jobs: Iterable[SweepJob]) -> None:
        """Register jobs before they start, so that jobs that never run are reported too."""
        for job in jobs:
            self.record.add(job)
            self.requested.add(job.name)

    def note(self) -> None:
        """Write the current state of the sweep."""
        self.record.write()
        write(collect(self.folder), self.folder, is_end=False)

    def finish(self) -> None:
        """Write the leaderboard and the page; print the leaderboard unless the caller prints the results."""
        self.record.forget_others(self.requested)
        with reporting(self.folder):
            self.record.write()
            board = collect(self.folder)
            write(board, self.folder)
            page = page_at_end(self.folder, board)
        if TERSE.get():
            return
        rows = self.record.rows.values()
        codes = [row.exit_code for row in rows if row.exit_code is not None and not row.pruned]
        stopped = sum(code in STOPPED for code in codes)
        counts = {
            "failed": len(codes) - stopped - codes.count(0),
            "stopped": stopped,
            "pruned": sum(row.pruned for row in rows),
            "not run": sum(row.exit_code is None for row in rows),
        }
        head = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
        parts = [head, *(f"{number} {word}" for word, number in counts.items() if number), f"by {board.goal}"]
        print_line(f"\n{', '.join(parts)}")
        for line in (*board.lines(), *board.verdict()):
            print_line(f"  {line}")
        for about, command in board.commands(self.folder):
            print_line(f"  {about}: {command}")
        if page is not None:
            print_line(f"  page  {page}")
        if self.budget is not None:
            share = self.budget.share(**self.record.spent)
            more = f"; go on with {shell_word(setting('sweep.resume', self.folder))} and a larger one"
            print_line(f"  budget  {share:.1%} of {self.budget.text} is used{more if share >= 1 else ''}")
        print_line(f"  leaderboard  {self.folder / 'leaderboard.md'}")


class SweepLoop:
    """One call of `Sweep.run`."""

    def __init__(self, sweep: Sweep, source: JobSource, screen: Screen) -> None:
        self._sweep, self._source, self._screen = sweep, source, screen
        self._events: SimpleQueue[ProcessExit | int] = SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._lines: dict[str, JobLine] = {}
        self._tries: dict[str, int] = {}
        self._number = 0
        self._kill_at = float("inf")
        self._poll_at = 0.0
        self._counted_at = self._written_at = time.monotonic()
        self._budget_reported = False
        self._metric: str | None = None
        """The monitored metric, once a job has written its config."""
        self.signals: list[int] = []
        """The signals received."""
        self.failed: SweepJob | None = None
        """The job whose failure ended the sweep."""

    def run(self) -> None:
        """Run all jobs of the source to their ends, or until a signal."""
        with signals_to(self._events.put):
            while True:
                if not self.signals and self.failed is None and not self._sweep.is_spent:
                    self._fill()
                self._show()
                if not self._running:
                    break
                self._handle_event()
                self._poll()

    def end_all(self) -> None:
        """Kill all running jobs."""
        for running in self._running.values():
            running.process.kill()

    # --- starting

    def _fill(self) -> None:
        """Start jobs while any fits into the free slots."""
        while (free := self._sweep.slots.free) and (job := self._source.next(free)) is not None:
            if not self._has_result(job):
                self._begin(job)

    def _has_result(self, job: SweepJob) -> bool:
        """Return whether the result of a job exists already, or is being computed."""
        sweep = self._sweep
        again = f"{job.label or 'the point'}: equals job {job.name}, which runs only once"
        twin = next((running for running in self._running.values() if running.job.name == job.name), None)
        if twin is not None:
            twin.duplicates.append(job)
            self._screen.report(again)
            return True
        row = sweep.record.add(job)
        is_listed = job.name in self._lines
        sweep.requested.add(job.name)
        if is_listed and row.exit_code == ConfigError.exit_code:  # it would be refused again
            self._screen.report(again)
            self._source.ended(job, ConfigError.exit_code)
            return True
        if not job.config or not is_complete(row):
            row.exit_code, row.pruned = None, False
            return False
        row.exit_code = 0
        sweep.note()
        if is_listed:
            self._screen.report(again)
        else:
            self._screen.report(f"{_title(job)}: already has a result, in {job.folder}")
            self._lines[job.name] = JobLine(
                name=job.name, label=job.label, state="done", progress=watched(job.folder, job.folder)
            )
        self._source.ended(job, 0)
        return True

    def _begin(self, job: SweepJob) -> None:
        lease = self._sweep.slots.take(job.slots)
        tries = self._tries[job.name] = self._tries.get(job.name, 0) + 1
        status = read_status(RunFolder(job.folder))
        row = self._sweep.record.rows[job.name]
        if not row.tries:
            RunFolder(job.folder).forget_result()  # the result of another config
        row.tries += 1
        command, goes_on = continued(job.command, job.folder)
        self._sweep.record.write()  # before the job starts: a sweep that is killed then must not train it again
        self._number += 1
        try:
            process = self._sweep.start(
                JobCommand(
                    number=self._number,
                    command=command,
                    environ=lease.environ,
                    log=job.folder / LOG,
                    report=self._events.put,
                    slots=job.slots,
                )
            )
        except BaseException:
            self._sweep.slots.give_back(lease)
            raise
        line = JobLine(name=job.name, label=job.label)
        self._lines.pop(job.name, None)
        self._lines[job.name] = line
        self._running[self._number] = _Running(job=job, process=process, lease=lease, line=line, begun=time.monotonic())
        before = "" if status.state == "unknown" else f": the run {status.summary()}"
        text = "starts" if not goes_on else f"goes on{before}" if tries == 1 else f"continues, try {tries}"
        self._screen.report(f"{_title(job)} {text}", transient=True)

    # --- waiting

    def _handle_event(self) -> None:
        """Wait for an event and handle it."""
        try:
            event = self._events.get(timeout=_POLL_S)
        except Empty:
            return
        finally:
            self._count()
        if not isinstance(event, ProcessExit):
            self._forward_signal(event)
        elif (running := self._running.pop(event.attempt, None)) is not None:
            running.process.kill()
            self._sweep.slots.give_back(running.lease)
            self._end(running, event.code)

    def _count(self) -> None:
        """Add the time since the last call to what the sweep has used, and stop its jobs if that is its budget."""
        sweep, now = self._sweep, time.monotonic()
        passed, self._counted_at = now - self._counted_at, now
        devices = sweep.slots.in_use / sweep.slots.jobs_per_device
        sweep.record.use(passed, runs=bool(self._running), devices=devices)
        if sweep.budget is None:
            return
        if now - self._written_at > _WRITE_S:  # what a killed sweep has used counts for the next one
            self._written_at = now
            sweep.record.write()
        if sweep.is_spent and not self._budget_reported:
            self._budget_reported = True
            text = f"sweep.budget={sweep.budget.text} is used up; {len(self._running)} running, each saves first"
            self._screen.report(f"stopping: {text}")
            for running in self._running.values():
                running.process.signal(signal.SIGINT)

    def _poll(self) -> None:
        """Update the progress of the running jobs."""
        if (now := time.monotonic()) < self._poll_at:
            return
        self._poll_at = now + _POLL_S
        if now >= self._kill_at:
            self.end_all()
        for running in list(self._running.values()):
            self._read_progress(running)
            if not running.stopped_by_search and not self.signals and self._source.watch(running.job):
                running.stopped_by_search = True
                running.process.signal(signal.SIGINT)

    def _read_progress(self, running: _Running) -> None:
        running.line.progress = watched(running.job.folder, running.job.folder)
        if self._metric is None and (cfg := config_of(running.job.folder)) is not None:
            self._metric = MonitoredMetric.of(cfg.eval).metric

    def _forward_signal(self, number: int) -> None:
        if self.signals and number == signal.SIGHUP:  # sent by the shell and the kernel when a terminal is closed
            return
        self.signals.append(number)
        if len(self.signals) > _MOST_SIGNALS:
            self.end_all()
        else:
            for running in self._running.values():
                running.process.signal(signal.Signals(number))
        if len(self.signals) == _MOST_SIGNALS:
            self._kill_at = time.monotonic() + _GRACE_S
        elif len(self.signals) == 1:
            self._screen.report(
                f"stopping: {len(self._running)} running, each saves first; press again to end them now"
            )

    # --- ending

    def _end(self, running: _Running, code: int) -> None:
        job, row = running.job, self._sweep.record.rows[running.job.name]
        running.line.seconds = time.monotonic() - running.begun
        self._read_progress(running)
        pruned = running.stopped_by_search and code in STOPPED
        may_retry = not self.signals and not pruned and code not in NOT_TRIED_AGAIN and not self._sweep.is_spent
        if may_retry and self._tries[job.name] <= self._sweep.retries:
            self._screen.report(f"{_title(job)}: {died(code)}; it is tried again")
            self._begin(job)  # at once: its slots are free, and it precedes jobs that have not started
            self._running[self._number].duplicates = running.duplicates
            return
        row.exit_code, row.pruned = code, pruned
        state: State = "done" if code == 0 else "pruned" if pruned else "stopped" if code in STOPPED else "failed"
        running.line.state = state
        self._sweep.note()
        text, log = f"{_title(job)} {state}", job.folder / LOG
        if state == "failed":
            last = last_line(log)
            text += f": {died(code)}{f', {last}' if last else ''} ({log})"
        else:
            progress = running.line.progress
            metric = None if progress is None else progress["metrics"].get(self._metric or "")
            text += f", {figure(metric)}" if state == "done" and metric is not None else ""
            text += f", {running.line.seconds:.1f} s"
        self._screen.report(text)
        if state == "failed" and self._sweep.on_error == "stop" and self.failed is None:
            self.failed = job
            self._screen.report(f"stopping: {len(self._running)} running, each saves first (sweep.on_error=stop)")
            for other in self._running.values():
                other.process.signal(signal.SIGINT)
        for twin in (job, *running.duplicates):
            self._source.ended(twin, code)

    def _show(self) -> None:
        total, slots = self._source.total, self._sweep.slots
        queued, lines = None if total is None else max(0, total - len(self._lines)), list(self._lines.values())
        self._screen.show(
            View(lines=lines, queued=queued, in_use=slots.in_use, slots=slots.total, metric=self._metric or "metric")
        )


def _title(job: SweepJob) -> str:
    return f"job {job.name} ({job.label})" if job.label else f"job {job.name}"
