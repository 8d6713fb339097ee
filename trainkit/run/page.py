"""Write `report.html`, the page of a run, only from files of the run folder."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError, TrainkitError, UnreadableError
from trainkit.files import open_regular, write_atomically
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import RunStatus, read_status
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.trainer.ownership import set_aside

if TYPE_CHECKING:
    from trainkit.report.curves import LoggedRows
    from trainkit.report.web.run_document import RankLine, Spread

FILE: Final = "report.html"
_DRAFT_S: Final = 60.0
"""Age in seconds from which a draft belongs to a killed process: writing one takes some milliseconds."""
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
    lines = []
    for rank in ranks[:_MOST_RANKS]:
        heartbeat, log = read_heartbeat(folder.heartbeat_of(rank)), logs / f"rank_{rank}.log" if rank else folder.log
        step, phase = (None, "") if heartbeat is None else (heartbeat.step, heartbeat.phase)
        lines.append(RankLine(rank=rank, step=step, phase=phase, log=log.relative_to(folder.path).as_posix()))
    return lines
