"""What came out of the jobs of a sweep, or of the runs below any folder: read from their `result.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from trainkit.config.schema import load_resolved
from trainkit.config.watched import Watched
from trainkit.errors import ConfigError

__all__ = ["NOT_RUN", "PRUNED", "Entry", "goal_of", "read_entries", "read_entry", "relative", "swept"]

NOT_RUN: Final = "not run"
PRUNED: Final = "pruned"
"""A job that a search ended because others did better: no failure, and not to be compared with whole trainings."""

_STOP: Final = "stop_at_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One job and what came out of it."""

    job: str
    """Its number in the sweep, or the name of its folder."""
    status: str
    """finished, pruned, stopped, failed, preempted, hangup, `exit 2` without a result, `not run`."""
    metrics: Mapping[str, float]
    overrides: tuple[str, ...]
    """What sets it apart."""
    seconds: float | None
    """Seconds of training alone."""
    folder: Path
    steps: int | None = None
    """Updates it made."""
    arguments: tuple[str, ...] = ()
    """All arguments of its run, as typed."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Of figures that are means over folds: the deviation of one fold from another."""


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


def read_entry(
    folder: Path,
    *,
    job: str,
    overrides: Sequence[str] = (),
    exit_code: int | None = 0,
    arguments: Sequence[str] = (),
    pruned: bool = False,
) -> Entry:
    """One job, from the `result.json` in its folder.

    Args:
        folder: the run's folder.
        job: how the leaderboard calls it.
        overrides: what sets it apart.
        exit_code: of its process; None: it was not run.
        arguments: all of its run; a `stop_at_step` that is none of them is a search's, which let it go there.
        pruned: whether a search stopped it while it ran.
    """
    result = _json(folder / "result.json") if exit_code is not None else {}
    metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items() if value is not None}
    seconds, steps = result.get("seconds"), result.get("steps")
    left = bool(arguments) and str(result.get("reason")).startswith(_STOP) and not _says(arguments, _STOP)
    return Entry(
        job=job,
        status=PRUNED if (pruned or left) and exit_code is not None else _status(result, exit_code),
        metrics=metrics,
        overrides=tuple(overrides),
        seconds=None if seconds is None else float(seconds),
        folder=folder,
        steps=None if steps is None else int(steps),
        arguments=tuple(arguments),
    )


def _status(result: Mapping[str, Any], exit_code: int | None) -> str:
    if exit_code is None:
        return NOT_RUN
    status = str(result.get("status") or "")
    if exit_code != 0 and status in ("", "finished"):
        status = f"exit {exit_code}" if exit_code > 0 else f"signal {-exit_code}"
    return status or "no result"


def _says(arguments: Sequence[str], key: str) -> bool:
    return any(text.lstrip("+").partition("=")[0] == key for text in arguments)


def read_entries(folder: Path) -> list[Entry]:
    """The jobs of a sweep's folder in their order, or all runs below any other folder."""
    jobs = _json(folder / "sweep.json").get("jobs")
    if not isinstance(jobs, list):
        found = sorted(path.parent for path in folder.rglob("result.json"))
        return [read_entry(run, job=relative(run, folder)) for run in found]
    labels = swept([job["overrides"] for job in jobs])
    return [
        read_entry(
            folder / job["folder"],
            job=job["job"],
            overrides=label,
            exit_code=job["exit_code"],
            arguments=job["overrides"],
            pruned=bool(job.get("pruned")),
        )
        for job, label in zip(jobs, labels, strict=True)
    ]


def relative(folder: Path, base: Path) -> str:
    """A folder as seen from another, with forward slashes."""
    return Path(os.path.relpath(folder, base)).as_posix()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
