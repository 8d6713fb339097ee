"""The leaderboard of a sweep: every job by `eval.metric`, as text for the screen, Markdown, CSV and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainkit.config.schema import Eval, load_resolved
from trainkit.config.watched import Watched
from trainkit.errors import ConfigError
from trainkit.report.drawing import Drawing, leaderboard_request
from trainkit.report.numbers import duration, figure

__all__ = ["Entry", "Leaderboard", "collect", "goal_of", "read_entry", "swept", "write"]

_MOST_IN_PICTURE = 30
_NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One job and what came out of it."""

    job: str
    """Its number in the sweep, or the name of its folder."""
    status: str
    """finished, stopped, failed, preempted, `exit 2` without a result, `not run`."""
    metrics: Mapping[str, float]
    overrides: tuple[str, ...]
    seconds: float | None
    """Seconds of training alone."""
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaderboard:
    """Jobs, best first; those without a figure last, in their own order.

    Example:
        >>> a, b = (
        ...     Entry(
        ...         job=str(number),
        ...         status="finished",
        ...         metrics={"val/loss": loss},
        ...         overrides=(f"seed={number}",),
        ...         seconds=1.5,
        ...         folder=Path(f"out/{number}"),
        ...     )
        ...     for number, loss in enumerate([0.5, 0.25])
        ... )
        >>> for line in Leaderboard.of([a, b], Watched.of(Eval())).lines():
        ...     print(line)
        #  job  status    val/loss  overrides  time   folder
        1  1    finished  0.25      seed=1     1.5 s  out/1
        2  0    finished  0.5       seed=0     1.5 s  out/0
    """

    goal: Watched
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry], goal: Watched) -> Leaderboard:
        """Order the entries by a goal."""
        board = cls(goal=goal, entries=tuple(entries))

        def place(entry: Entry) -> tuple[bool, float]:
            value = board.value(entry)
            return (True, 0.0) if value is None else (False, goal.sign * value)

        return cls(goal=goal, entries=tuple(sorted(board.entries, key=place)))

    def value(self, entry: Entry) -> float | None:
        """What an entry is ordered by; None where it has no such figure, or one that is no number."""
        value = entry.metrics.get(self.goal.metric)
        return value if value is not None and math.isfinite(value) else None

    def top(self, count: int) -> Leaderboard:
        """The first so many."""
        return Leaderboard(goal=self.goal, entries=self.entries[:count])

    def lines(self) -> list[str]:
        """As an aligned table."""
        head = ("#", "job", "status", self.goal.metric, "overrides", "time", "folder")
        rows = [head, *((str(rank), *self._cells(entry)) for rank, entry in enumerate(self.entries, start=1))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def _cells(self, entry: Entry) -> tuple[str, ...]:
        value = self.value(entry)
        return (
            entry.job,
            entry.status,
            "" if value is None else figure(value),
            " ".join(entry.overrides),
            "" if entry.seconds is None else duration(entry.seconds),
            "" if entry.status == _NOT_RUN else str(entry.folder),
        )

    def markdown(self, *, base: Path) -> str:
        """As a page with a table; folders relative to `base`."""
        lines = [
            f"# Leaderboard by {self.goal}",
            "",
            f"| # | job | status | {self.goal.metric} | overrides | time | folder |",
            "|--:|:----|:-------|----:|:----------|-----:|:-------|",
        ]
        for rank, entry in enumerate(self.entries, start=1):
            job, status, value, overrides, seconds, found = (cell.replace("|", "\\|") for cell in self._cells(entry))
            code = f"`{overrides}`" if overrides else ""
            folder = _relative(entry.folder, base)
            link = f"[{folder}]({folder})" if found else ""
            lines.append(f"| {rank} | {job} | {status} | {value} | {code} | {seconds} | {link} |")
        return "\n".join(lines) + "\n"

    def csv(self, *, base: Path) -> str:
        """As a table for programs: full precision, a column for each swept key; folders relative to `base`."""
        settings = [dict(_key_value(text) for text in entry.overrides) for entry in self.entries]
        keys = list(dict.fromkeys(key for setting in settings for key in setting))
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["rank", "job", "status", self.goal.metric, *keys, "seconds", "folder"])
        for rank, (entry, setting) in enumerate(zip(self.entries, settings, strict=True), start=1):
            figures = [_blank(self.value(entry)), *(setting.get(key, "") for key in keys), _blank(entry.seconds)]
            table.writerow([rank, entry.job, entry.status, *figures, _relative(entry.folder, base)])
        return text.getvalue()


def _blank(value: float | None) -> str:
    return "" if value is None else repr(value)


def _key_value(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _relative(folder: Path, base: Path) -> str:
    return Path(os.path.relpath(folder, base)).as_posix()


def swept(overrides: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Of each job's overrides, those that not every job has.

    Example:
        >>> swept([["epochs=1", "seed=0"], ["epochs=1", "seed=1"]])
        [('seed=0',), ('seed=1',)]
    """
    common = set.intersection(*(set(job) for job in overrides)) if overrides else set()
    return [tuple(text for text in job if text not in common) for job in overrides]


def goal_of(folder: Path) -> Watched | None:
    """What the run in a folder goes by; None where its config cannot be read."""
    try:
        return Watched.of(load_resolved(folder / "resolved.yaml").eval)
    except (OSError, ConfigError):
        return None


def read_entry(folder: Path, *, job: str, overrides: Sequence[str] = (), exit_code: int | None = 0) -> Entry:
    """One job, from the `result.json` in its folder.

    Args:
        folder: the run's folder.
        job: how the leaderboard calls it.
        overrides: what sets it apart.
        exit_code: of its process; None: it was not run.
    """
    result = _json(folder / "result.json") if exit_code is not None else {}
    status = str(result.get("status") or "")
    if exit_code is None:
        status = _NOT_RUN
    elif exit_code != 0 and status in ("", "finished"):
        status = f"exit {exit_code}" if exit_code > 0 else f"signal {-exit_code}"
    metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items() if value is not None}
    seconds = result.get("seconds")
    return Entry(
        job=job,
        status=status or "no result",
        metrics=metrics,
        overrides=tuple(overrides),
        seconds=None if seconds is None else float(seconds),
        folder=folder,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def collect(folder: Path, goal: Watched | None = None) -> Leaderboard:
    """The leaderboard of a sweep's folder, or of all runs below any other folder.

    Args:
        folder: of a sweep, or any folder with runs in it.
        goal: what to order by; None: what the first run that says so goes by.
    """
    jobs = _json(folder / "sweep.json").get("jobs")
    if isinstance(jobs, list):
        labels = swept([job["overrides"] for job in jobs])
        entries = [
            read_entry(folder / job["folder"], job=job["job"], overrides=label, exit_code=job["exit_code"])
            for job, label in zip(jobs, labels, strict=True)
        ]
    else:
        found = sorted(path.parent for path in folder.rglob("result.json"))
        entries = [read_entry(run, job=_relative(run, folder)) for run in found]
    if goal is None:
        goal = next((known for entry in entries if (known := goal_of(entry.folder)) is not None), Watched.of(Eval()))
    return Leaderboard.of(entries, goal)


def write(board: Leaderboard, folder: Path, *, picture: bool = True) -> None:
    """Write `leaderboard.{md,csv,png}`; a job without a figure has no dot in the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("leaderboard.md", board.markdown(base=folder)), ("leaderboard.csv", board.csv(base=folder))):
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    dots = [(entry, value) for entry in board.entries if (value := board.value(entry)) is not None]
    if picture and dots:
        jobs = [(" ".join(entry.overrides) or entry.job, value) for entry, value in dots[:_MOST_IN_PICTURE]]
        request = leaderboard_request(folder / "leaderboard.png", title=folder.name, metric=str(board.goal), jobs=jobs)
        Drawing(request).wait(60.0)
