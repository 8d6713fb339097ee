"""A sweep: the jobs of one folder and their results."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from trainkit.config.commands import shell_word
from trainkit.config.grammar import setting
from trainkit.run.signals import stop_error, stop_signals
from trainkit.storage import reporting
from trainkit.sweeps.job_sources import JobSource, SweepJob
from trainkit.sweeps.loop.processes import STOPPED, Starter, start_fresh
from trainkit.sweeps.loop.slots import Slots
from trainkit.sweeps.loop.sweep_loop import SweepLoop
from trainkit.sweeps.results.job_results import PRUNED, SweepState
from trainkit.sweeps.results.leaderboard import collect, write
from trainkit.sweeps.results.page import page_at_end
from trainkit.sweeps.screen import Screen, print_line, screen_for
from trainkit.trainer.ownership import locked


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
    ) -> None:
        self.folder = folder
        self.slots = slots or Slots(count=1)
        self.record = SweepState.read(folder, command=command)
        self.requested: set[str] = set()
        """Names of the jobs of this sweep, without those of an earlier one in its folder."""
        self.halted = False
        """Whether a failure has ended the sweep."""
        self.retries, self.on_error, self.start = retries, on_error, start
        self._make_screen = screen

    @property
    def exit_codes(self) -> dict[str, int]:
        """Name of the job -> exit code, for the jobs that have ended."""
        return {name: row.exit_code for name, row in self.record.rows.items() if row.exit_code is not None}

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
        if not self.halted:
            with reporting(self.folder):
                self._run(source)

    def _run(self, source: JobSource) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".lock"), contextlib.closing(self._make_screen()) as screen:
            round_ = SweepLoop(self, source, screen)
            try:
                round_.run()
            finally:
                round_.end_all()
        self.halted = round_.failed is not None
        if round_.signals:
            self._refuse(round_.signals[0], source)

    def expect(self, jobs: Iterable[SweepJob]) -> None:
        """Register jobs before they start, so that jobs that never run are reported too."""
        for job in jobs:
            self.record.add(job)
            self.requested.add(job.name)

    def note(self) -> None:
        """Write the current state of the sweep."""
        self.record.write()
        write(collect(self.folder), self.folder, picture=False)

    def finish(self) -> None:
        """Write the leaderboard, its plot and the page; print the leaderboard."""
        self.record.forget_others(self.requested)
        with reporting(self.folder):
            self.record.write()
            board = collect(self.folder)
            write(board, self.folder)
            page = page_at_end(self.folder, board)
        rows = self.record.rows.values()
        codes = [row.exit_code for row in rows if row.exit_code is not None and not row.pruned]
        stopped = sum(code in STOPPED for code in codes)
        counts = {
            "failed": len(codes) - stopped - codes.count(0),
            "stopped": stopped,
            "pruned": sum(entry.status == PRUNED for entry in board.entries),
            "not run": sum(row.exit_code is None for row in rows),
        }
        head = f"{len(rows)} job{'' if len(rows) == 1 else 's'}"
        parts = [head, *(f"{number} {what}" for what, number in counts.items() if number), f"by {board.goal}"]
        print_line(f"\n{', '.join(parts)}")
        for line in board.lines():
            print_line(f"  {line}")
        for what, command in board.commands(self.folder):
            print_line(f"  {what}: {command}")
        if page is not None:
            print_line(f"  page  {page}")
        print_line(f"  leaderboard  {self.folder / 'leaderboard.md'}")

    def _refuse(self, number: int, source: JobSource) -> None:
        """End the sweep early, with the error of the signal."""
        ended = len(self.requested & self.exit_codes.keys())
        known = f" of {source.total}" if source.total is not None else ""
        text = f"the sweep was stopped: {ended}{known} jobs were started. The same command resumes it with "
        text += shell_word(setting("sweep.resume", self.folder))
        raise stop_error(stop_signals()[signal.Signals(number)], text)
