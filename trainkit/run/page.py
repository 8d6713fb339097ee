"""`report.html`, the page of a run: written during the run and at its end, only from files of the run folder.

The process with the lock of the folder writes it, like `status.json`, from a separate thread: it costs the steps no
time, and its errors do not end or slow down a run.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError, TrainkitError, UnreadableError
from trainkit.files import open_regular, write_atomically
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import RunStatus, read_status
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.trainer.ownership import set_aside, uncontested

if TYPE_CHECKING:
    from trainkit.report.web.curves import LoggedRows, MetricsReader
    from trainkit.report.web.run_document import RankLine, Spread

FILE: Final = "report.html"
_LOOK_S: Final = 2.0
"""Seconds between two checks for new rows."""
_EVERY_S: Final = 60.0
"""Seconds between two pages while nothing is evaluated."""
_AFTER_EVALUATION_S: Final = 10.0
"""Age in seconds from which a new evaluation triggers a new page."""
_DRAFT_S: Final = 60.0
"""Age in seconds from which a draft belongs to a killed process: writing one takes some milliseconds."""
_REST_S: Final = 0.03
"""Seconds that the thread sleeps after 3 ms of reading, until the run ends."""
_RANK: Final = re.compile(r"rank_(\d{1,6})")
_MOST_RANKS: Final = 600

_log = logging.getLogger(__name__)


class PageWriter:
    """Writes `report.html` for the duration of its block, starting with `follow`; before, there is no run to show."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        confirm: Callable[[], None] = uncontested,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._confirm, self._clock = folder, confirm, clock
        self._cfg: RunConfig | None = None
        self._metrics: MetricsReader | None = None
        self._has_ended = threading.Event()
        self._written_at, self._evaluations, self._has_failed = -float("inf"), 0, False
        self._thread = threading.Thread(target=self._loop, name="report", daemon=True)

    def follow(self, cfg: RunConfig) -> None:
        """Write the page of the run with this config from now on, if the config requests it."""
        if cfg.report_page and self._cfg is None:
            self._cfg, self._written_at = cfg, self._clock()
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if self._cfg is not None:
            self._thread.join()
            self._guarded(self.write)

    def _loop(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            self._guarded(self.look)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call a function; an error in writing a page must not end a run, and is logged once."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - no error may end the training
            if not self._has_failed:
                _log.warning("%s cannot be written: %s: %s", FILE, type(error).__name__, error)
            self._has_failed = True

    def look(self) -> None:
        """Read the rows that were added, and write the page if it is due."""
        age = self._clock() - self._written_at
        is_due = age >= _EVERY_S
        if self._folder.metrics.exists():  # without a row there is nothing to read
            rows = self._reader().read()
            is_due = is_due or (rows.num_evaluations > self._evaluations and age >= _AFTER_EVALUATION_S)
        if is_due:
            self.write()

    def write(self) -> None:
        """Write the page now."""
        rows = self._reader().read()
        self._evaluations = rows.num_evaluations
        self._confirm()
        write_run_page(self._folder, self._folder.path / FILE, cfg=self._cfg, rows=rows)
        self._written_at = self._clock()

    def _reader(self) -> MetricsReader:
        if self._metrics is None:
            from trainkit.report.web.curves import MetricsReader  # noqa: PLC0415 - after the run has begun

            self._metrics = MetricsReader(self._folder.metrics, rest=lambda: self._has_ended.wait(_REST_S))
        return self._metrics


def write_run_page(
    folder: RunFolder,
    path: Path,
    *,
    cfg: RunConfig | None = None,
    rows: LoggedRows | None = None,
    spread: Spread | None = None,
) -> None:
    """Write the page of a run; any other file of that name is renamed.

    Args:
        folder: the run, whose files may be damaged or missing.
        path: the file to write.
        cfg: the config; None: that of `resolved.yaml`.
        rows: the metrics read so far; None: they are read now.
        spread: the best metric of the runs that differ only in the seed.

    Raises:
        OSError: it cannot be written.
    """
    from trainkit.report.web.curves import MetricsReader  # noqa: PLC0415 - for a page only
    from trainkit.report.web.run_document import RunFacts, Standing, run_page  # noqa: PLC0415
    from trainkit.report.web.run_files import RunFiles  # noqa: PLC0415

    status, files = read_status(folder), RunFiles.read(folder.path)
    facts = RunFacts(
        files=files,
        rows=MetricsReader(folder.metrics).read() if rows is None else rows,
        cfg=cfg or _config(folder),
        standing=Standing(state=status.state, step=status.step, words=_words(status)),
        ranks=_ranks(folder),
        spread=spread,
        lasted=_lasted(files.environment, status),
    )
    write_page(path, run_page(facts))


def write_page(path: Path, page: str) -> None:
    """Write a page atomically: a reader sees the old page or the new one. A file that trainkit did not write is
    renamed.

    Raises:
        OSError: it cannot be written.
    """
    from trainkit.report.web.page import MARK  # noqa: PLC0415 - for a page only

    with contextlib.suppress(FileNotFoundError):
        path.lstat()
        if not _begins_with(path, MARK):
            set_aside(path, "is not a page that trainkit wrote")
    write_atomically(path, page, sync=False)
    _remove_drafts(path, MARK)


def _remove_drafts(page: Path, mark: bytes) -> None:
    """Remove drafts of this page from killed processes (`.report.html.PID`).

    What does not begin as a page is not trainkit's, and a draft of the last minute may be under way in another process.
    Both times are those of the file system, so that clocks of several hosts do not matter.
    """
    with contextlib.suppress(OSError):
        written = page.lstat().st_mtime
        for draft in page.parent.glob(f".{glob.escape(page.name)}.*"):
            is_named = draft.suffix[1:].isdecimal()
            if is_named and written - draft.lstat().st_mtime > _DRAFT_S and _begins_with(draft, mark):
                draft.unlink(missing_ok=True)


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(mark)) == mark
    except UnreadableError:
        return False


def _config(folder: RunFolder) -> RunConfig | None:
    try:
        return load_resolved(folder.resolved)
    except (ConfigError, UnreadableError):
        return None


def _words(status: RunStatus) -> str:
    """Return the current state of a run, in words."""
    if status.is_running:
        at = "" if status.step is None else f" at step {status.step:,}"
        return f"{'starts' if status.state == 'starting' else 'runs'}{at}"
    return status.summary()


def _lasted(environment: Mapping[str, Any], status: RunStatus) -> float | None:
    """Return the seconds from the start of the last command of a run to its end, to a second; None: unknown."""
    if status.updated is None or status.is_running:
        return None
    try:
        started = datetime.fromisoformat(str(environment.get("started"))).timestamp()
    except (ValueError, OverflowError):
        return None
    return status.updated - started if status.updated >= started else None


def _ranks(folder: RunFolder) -> list[RankLine]:
    """Return the last heartbeat of each rank."""
    from trainkit.report.web.run_document import RankLine  # noqa: PLC0415 - for a page only

    try:
        live, logs = folder.live, folder.logs
        names = [path.name for path in live.iterdir()]
    except (OSError, TrainkitError):
        return []
    ranks = sorted(int(match[1]) for name in names if (match := _RANK.fullmatch(name)))
    return [_rank(RankLine, folder, rank, logs) for rank in ranks[:_MOST_RANKS]]


def _rank(kind: Any, folder: RunFolder, rank: int, logs: Path) -> RankLine:
    heartbeat = read_heartbeat(folder.heartbeat_of(rank))
    log = folder.log if rank == 0 else logs / f"rank_{rank}.log"
    line: RankLine = kind(
        rank=rank,
        step=None if heartbeat is None else heartbeat.step,
        phase="" if heartbeat is None else heartbeat.phase,
        log=log.relative_to(folder.path).as_posix(),
    )
    return line
