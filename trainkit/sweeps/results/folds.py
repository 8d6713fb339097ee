"""Cross-validation on the leaderboard: the runs of a point, one per fold, as one entry with mean and spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from trainkit.sweeps.results.job_results import JobResult

_FOLD = "cv.fold="


def by_point(entries: Iterable[JobResult]) -> list[JobResult]:
    """Combine the folds of each point into one entry; other entries stay as they are.

    Returns:
        Entries: for a point, the mean of each metric over its folds with the sample standard deviation as spread, and
        the sum of the seconds. A point with a failed fold has no metrics, so that no mean of fewer folds is compared
        with one of all.
    """
    points: dict[tuple[str, ...], list[JobResult]] = {}
    for entry in entries:
        folds = any(text.startswith(_FOLD) for text in entry.arguments)
        key = tuple(text for text in entry.arguments if not text.startswith(_FOLD)) if folds else ("", entry.job)
        points.setdefault(key, []).append(entry)
    return [_combine(found) if _is_fold(found[0]) else found[0] for found in points.values()]


def _is_fold(entry: JobResult) -> bool:
    return any(text.startswith(_FOLD) for text in entry.arguments)


def _combine(folds: Sequence[JobResult]) -> JobResult:
    whole = all(entry.status == "finished" for entry in folds)
    names = set.intersection(*(set(entry.metrics) for entry in folds)) if whole else set()
    values = {name: [entry.metrics[name] for entry in folds] for name in sorted(names)}
    first, seconds = folds[0], [entry.seconds for entry in folds if entry.seconds is not None]
    jobs = [entry.job for entry in folds]
    return JobResult(
        job=jobs[0] if len(jobs) == 1 else f"{jobs[0]}-{jobs[-1]}",
        status="finished" if whole else _missing_text(folds),
        metrics={name: fmean(found) for name, found in values.items()},
        spread={name: _spread(found) for name, found in values.items()},
        overrides=tuple(text for text in first.overrides if not text.startswith(_FOLD)),
        seconds=sum(seconds) if seconds else None,
        folder=first.folder,
        arguments=tuple(text for text in first.arguments if not text.startswith(_FOLD)),
    )


def _missing_text(folds: Sequence[JobResult]) -> str:
    """Return how many folds have results, and the status of the first other one."""
    others = [entry.status for entry in folds if entry.status != "finished"]
    return f"{len(folds) - len(others)} of {len(folds)} folds, {others[0]}"


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over folds; NaN for a single fold, or if a value is not finite."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
