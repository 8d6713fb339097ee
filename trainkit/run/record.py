"""Record a run: its commands, its log, `status.json` with its state, and `report.html`, its page.

The process with the lock of the folder writes them (the only process of a run, its supervisor, or rank 0 of an external
launch), status and page from separate threads: they cost the steps no time, and their errors do not end or slow down a
run.

`environment.json` holds the first command of a run, and `settings.json` the keys that differ from its recipe, with the
origin of each. A command that continues the run adds the keys that it sets, and the step of the checkpoint that it
continues from.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from trainkit.cluster.host import Machine, ProcessId
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError, TrainkitError, UnreadableError, status_of_error
from trainkit.files import open_regular, read_map, write_atomically, write_json_atomically
from trainkit.report.train_log import TrainLog, recorded_output
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import ENDED, read_status
from trainkit.run.folder.status import FILE as STATUS
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.trainer.manifest import list_complete
from trainkit.trainer.ownership import set_aside, uncontested

if TYPE_CHECKING:
    from trainkit.report.curves import LoggedRows, MetricsReader
    from trainkit.report.web.run_document import RankLine, Spread


PAGE: Final = "report.html"
_RANK: Final = re.compile(r"rank_(\d{1,6})")
_MOST_RANKS: Final = 600


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
    from trainkit.report.curves import MetricsReader  # noqa: PLC0415 - for a page only
    from trainkit.report.web.run_document import RunFacts, RunFiles, Standing, run_page  # noqa: PLC0415

    status, files, lasted = read_status(folder), RunFiles.read(folder.path), None
    words = status.summary()
    if status.is_running:
        position = "" if status.step is None else f" at step {status.step:,}"
        words = f"{'starts' if status.state == 'starting' else 'runs'}{position}"
    elif status.updated is not None:
        with contextlib.suppress(ValueError, OverflowError):  # of the last command, to a second
            started = datetime.fromisoformat(str(files.environment.get("started"))).timestamp()
            lasted = status.updated - started if status.updated >= started else None
    with contextlib.suppress(ConfigError, UnreadableError):
        cfg = cfg or load_resolved(folder.resolved)
    facts = RunFacts(
        files=files,
        rows=MetricsReader(folder.metrics).read() if rows is None else rows,
        cfg=cfg,
        standing=Standing(state=status.state, step=status.step, words=words),
        ranks=_ranks(folder),
        spread=spread,
        lasted=lasted,
    )
    write_page(path, run_page(facts))


def write_page(path: Path, page: str) -> None:
    """Write a page atomically: a reader sees the old page or the new one. A file that trainkit did not write is
    renamed.

    Raises:
        OSError: it cannot be written.
    """
    from trainkit.report.web.page import MARK  # noqa: PLC0415 - for a page only

    if os.path.lexists(path):
        begin = b""
        with contextlib.suppress(UnreadableError), open_regular(path) as file:
            begin = file.read(len(MARK))
        if begin != MARK:
            set_aside(path, "is not a page that trainkit wrote")
    write_atomically(path, page, sync=False)


def _ranks(folder: RunFolder) -> list[RankLine]:
    """Return the last heartbeat of each rank."""
    from trainkit.report.web.run_document import RankLine  # noqa: PLC0415 - for a page only

    ranks: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        ranks = sorted(int(match[1]) for path in folder.live.iterdir() if (match := _RANK.fullmatch(path.name)))
    lines = []
    for rank in ranks[:_MOST_RANKS]:
        heartbeat, log = read_heartbeat(folder.heartbeat_of(rank)), folder.log_of(rank) if rank else folder.log
        step, phase = (None, "") if heartbeat is None else (heartbeat.step, heartbeat.phase)
        lines.append(RankLine(rank=rank, step=step, phase=phase, log=log.relative_to(folder.path).as_posix()))
    return lines


_WRITE_S: Final = 2.0
"""Seconds between two reads of the step for `status.json`."""
_REFRESH_S: Final = 15.0
"""Seconds after which `status.json` is written again although nothing has changed."""
_LOOK_S: Final = 2.0
"""Seconds between two checks for new rows."""
_EVERY_S: Final = 60.0
"""Seconds between two pages while nothing is evaluated."""
_AFTER_EVALUATION_S: Final = 10.0
"""Age in seconds from which a new evaluation triggers a new page."""
_REST_S: Final = 0.03
"""Seconds that the thread sleeps after 3 ms of reading, until the run ends."""
_SETTINGS: Final = "settings.json"
_LIMIT: Final = 1 << 20
"""Size limit of a record of commands, in bytes."""
_FIRST: Final = ("argv", "notes")
"""Keys of `environment.json` that are kept of the first command."""
_MOST_COMMANDS: Final = 1000
"""Commands that are recorded, the latest ones."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of an active run."""

    folder: RunFolder
    log: TrainLog
    status: StatusFile
    page: PageWriter

    def follow_heartbeat(self) -> None:
        """Read the step from the heartbeat of rank 0, which another process writes."""

        def step() -> int | None:
            heartbeat = read_heartbeat(self.folder.heartbeat_of(0))
            return None if heartbeat is None or heartbeat.phase == "start" else heartbeat.step

        self.status.follow(step)


@contextmanager
def recorded_run(folder: RunFolder, *, confirm: Callable[[], None] = uncontested) -> Iterator[RunRecord]:
    """Record the output of a run, its status, and the error that ends it, for the duration of the block."""
    folder.take()  # refuses a folder with files of the user before one is written
    with (
        recorded_output(folder.log, separated=True) as log,
        PageWriter(folder, confirm=confirm) as page,  # its last page needs the last status
        StatusFile(folder, confirm=confirm) as status,
    ):
        try:
            yield RunRecord(folder=folder, log=log, status=status, page=page)
        except BaseException as error:
            log.write_error(error)
            raise


class StatusFile:
    """Writes `status.json` for the duration of its block."""

    def __init__(self, folder: RunFolder, *, confirm: Callable[[], None] = uncontested) -> None:
        self._folder, self._confirm = folder, confirm
        mark = ProcessId.of(os.getpid())
        self._constant = {"version": 1, "pid": mark.pid, "process_start": mark.started, **asdict(Machine.here())}
        self._step_now: Callable[[], int | None] = lambda: None
        self._step: int | None = None
        self._end: dict[str, float | None] = {"last_step": None}
        self._changed, self._has_ended = threading.Event(), threading.Event()
        self._written: tuple[Any, ...] = ()
        self._written_at = -float("inf")
        self._thread = threading.Thread(target=self._update_loop, name="status", daemon=True)

    def follow(self, step_now: Callable[[], int | None]) -> None:
        """Read the step of the run from a function from now on; None means that the run is starting."""
        self._step_now = step_now
        self._changed.set()

    def aim_at(self, last_step: int | None, seconds: float | None) -> None:
        """Set the number of updates, and the seconds of training, of which the first that is reached ends the run."""
        self._end = {"last_step": last_step} if seconds is None else {"last_step": last_step, "stop_after_s": seconds}

    def __enter__(self) -> Self:
        self._write("starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._changed.set()
        self._thread.join()
        result = self._folder.read_result() or {}
        state = str(result.get("status")) if error is None else status_of_error(error)
        if isinstance(result.get("steps"), int):
            self._step = result["steps"]
        self._write(state if state in ENDED else "finished", sync=True)

    def _update_loop(self) -> None:
        while not self._has_ended.is_set():
            self._changed.wait(_WRITE_S)
            self._changed.clear()
            if not self._has_ended.is_set():
                step = self._step_now()
                self._step = self._step if step is None else step
                self._write("starting" if step is None else "running")

    def _write(self, state: str, *, sync: bool = False) -> None:
        """Write the file if something has changed, or it is old; write errors are ignored."""
        current = (state, self._step, any(self._folder.checkpoints.glob("step_*/manifest.json")))
        if current == self._written and time.monotonic() - self._written_at < _REFRESH_S:
            return
        content = {
            "state": state,
            "step": self._step,
            **self._end,
            "resumable": current[2],
            "updated": round(time.time(), 3),
            "updated_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._constant,
        }
        path = self._folder.path / STATUS
        draft = path.with_name(f".{STATUS}")  # a fixed name: a killed process leaves at most one such file
        with contextlib.suppress(OSError, TrainkitError):
            self._confirm()
            draft.unlink(missing_ok=True)
            with draft.open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
            self._written, self._written_at = current, time.monotonic()


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

    def __exit__(self, *_: object) -> None:
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
                _log.warning("%s cannot be written: %s: %s", PAGE, type(error).__name__, error)
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
        write_run_page(self._folder, self._folder.path / PAGE, cfg=self._cfg, rows=rows)
        self._written_at = self._clock()

    def _reader(self) -> MetricsReader:
        if self._metrics is None:
            from trainkit.report.curves import MetricsReader  # noqa: PLC0415 - after the run has begun

            self._metrics = MetricsReader(self._folder.metrics, rest=lambda: self._has_ended.wait(_REST_S))
        return self._metrics


def first_command(environment: Path) -> dict[str, Any]:
    """Return `begun` for the `environment.json` that replaces this one; an empty dict if no command has begun."""
    try:
        before = read_map(environment, {"argv": list, "notes": list}, optional={"begun": dict}, limit=_LIMIT)
    except UnreadableError:
        return {}
    begun = before.get("begun") or {name: before[name] for name in _FIRST}
    return {"begun": {name: [value for value in begun.get(name) or () if isinstance(value, str)] for name in _FIRST}}


def record_settings(folder: Path, changed: Sequence[Mapping[str, Any]]) -> None:
    """Write `settings.json`; keys recorded by an earlier command of this run stay, unless they are set again.

    A file that cannot be written does not end the run: the page of the run alone reads it.
    """
    before: Mapping[str, Any] = {}
    with contextlib.suppress(UnreadableError):  # there is no earlier command
        before = read_map(folder / _SETTINGS, {"settings": list}, optional={"continued_at": list}, limit=_LIMIT)
    entries = (entry for entry in before.get("settings", []) if isinstance(entry, dict))
    recorded = {entry["key"]: entry for entry in entries if isinstance(entry.get("key"), str)}
    for entry in changed:
        recipe = recorded[entry["key"]].get("recipe") if entry["key"] in recorded else entry["recipe"]
        recorded[entry["key"]] = {**entry, "recipe": recipe}
    steps = [step for step in before.get("continued_at") or [] if type(step) is int]
    newest = list_complete(folder / "checkpoints")[:1] if before else []  # which a command continues now
    steps += [checkpoint.step for checkpoint in newest if checkpoint.step not in steps]
    content = {"version": 1, "settings": [*recorded.values()], "continued_at": steps[-_MOST_COMMANDS:]}
    with contextlib.suppress(OSError):
        write_json_atomically(folder / _SETTINGS, content)
