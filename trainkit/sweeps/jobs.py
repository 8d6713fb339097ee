"""Jobs of a sweep: a process each, one after the other; none is left behind, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Final

from trainkit.errors import StoppedError, TerminatedError
from trainkit.run.group import Exited, WorkerGroup
from trainkit.sweeps.leaderboard import collect, swept, write

__all__ = ["Job", "Sweep", "free_folder"]

_MOST_SIGNALS: Final = 2
"""Ctrl-C once: the job saves and stops; twice: it stops now; more often: it is ended."""

_STOPPED: Final = (StoppedError.exit_code, TerminatedError.exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a sweep."""

    name: str
    """What the leaderboard calls it: its number."""
    folder: Path
    """Where its run goes; does not exist yet."""
    overrides: tuple[str, ...]
    """All arguments of this run."""
    command: tuple[str, ...]
    """The process to start."""


@dataclass(kw_only=True)
class Sweep:
    """The jobs of one sweep and what became of them.

    `sweep.json`, `leaderboard.md` and `leaderboard.csv` in its folder are right after every job.
    """

    folder: Path
    jobs: list[Job] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)
    """By name of the job; without those that were not run."""

    def run(self, jobs: Sequence[Job]) -> list[int]:
        """Run jobs one after the other; one that fails does not keep the others from running.

        Each is a session of its own, so that a signal reaches it through this process only, and it ends with this
        process, also where that is killed.

        Returns:
            Their exit codes.

        Raises:
            StoppedError: Ctrl-C; the job that ran was stopped in good order, the others were not started.
            TerminatedError: the same by SIGTERM.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs += jobs
        news: SimpleQueue[Exited | int] = SimpleQueue()
        signals: list[int] = []
        labels = swept([job.overrides for job in jobs])
        with _signals_to(news):
            for place, job in enumerate(jobs):
                _say(f"\njob {place + 1} of {len(jobs)}: {' '.join(labels[place])}".rstrip(": "))
                self.exit_codes[job.name] = _run(job, place, news, signals)
                self._note()
                if signals:
                    break
        if signals:
            self._refuse(signals[0])
        return [self.exit_codes[job.name] for job in jobs]

    def finish(self) -> None:
        """Write the leaderboard with its picture, and print it."""
        board = collect(self.folder)
        write(board, self.folder)
        codes = list(self.exit_codes.values())
        stopped = sum(code in _STOPPED for code in codes)
        counts = {
            "failed": len(codes) - stopped - codes.count(0),
            "stopped": stopped,
            "not run": len(self.jobs) - len(codes),
        }
        head = f"{len(self.jobs)} job{'' if len(self.jobs) == 1 else 's'}"
        told = [head, *(f"{number} {what}" for what, number in counts.items() if number), f"by {board.goal}"]
        _say(f"\n{', '.join(told)}")
        for line in board.lines():
            _say(f"  {line}")
        _say(f"  leaderboard  {self.folder / 'leaderboard.md'}")

    def _refuse(self, number: int) -> None:
        """End the sweep early, as the signal asked."""
        text = f"the sweep was stopped: {len(self.exit_codes)} of {len(self.jobs)} jobs were started."
        raise StoppedError(text) if number == signal.SIGINT else TerminatedError(text)

    def _note(self) -> None:
        rows = [
            {
                "job": job.name,
                "folder": os.path.relpath(job.folder, self.folder),
                "overrides": list(job.overrides),
                "exit_code": self.exit_codes.get(job.name),
            }
            for job in self.jobs
        ]
        partial = self.folder / f".sweep.json.{os.getpid()}"
        partial.write_text(json.dumps({"jobs": rows}, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.folder / "sweep.json")
        write(collect(self.folder), self.folder, picture=False)


def free_folder(folder: Path) -> Path:
    """The folder, or the same with -2, -3 ... where it exists: a sweep of an earlier day may have used its name."""
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not candidate.exists():
            return candidate
    raise AssertionError  # count() never ends


def _run(job: Job, place: int, news: SimpleQueue[Exited | int], signals: list[int]) -> int:
    """Run one job to its end, and hand it the signals that come meanwhile."""
    with WorkerGroup(0, news.put) as group:
        group.start(place, job.command, os.environ, None)
        while True:
            event = news.get()
            if isinstance(event, Exited):
                return event.code
            signals.append(event)
            if len(signals) > _MOST_SIGNALS:
                group.kill()
            else:
                group.signal(signal.Signals(event))


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
