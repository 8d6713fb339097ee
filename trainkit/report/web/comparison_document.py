"""Content of the page that compares runs, as JSON: a few runs side by side, or all jobs of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from trainkit.config.schema import MonitoredMetric
from trainkit.fields import Tag
from trainkit.report.curves import LoggedRows, Point, column, compact_curve, number
from trainkit.report.web.page import cleaned, make_page

SCRIPTS: Final = ("dom.js", "charts.js", "paper.js", "coordinates.js", "comparison.js")
_POINTS: Final = 500
"""Largest number of points of a curve."""
_MOST_DRAWN: Final = 200
"""Largest number of runs with curves: the best by the metric."""
_MOST_RUNS: Final = 1_000
"""Largest number of runs: the best by the metric."""
_FEW: Final = 8
"""Up to this many runs, every metric is drawn; with more, only the monitored metric and the training loss."""
_MOST_METRICS: Final = 40
_ORDER: Final = tuple(tag.value for tag in (Tag.maths, Tag.placement, Tag.speed, Tag.cosmetic))


@dataclass(frozen=True, kw_only=True)
class DifferingKey:
    """A key in which the runs differ."""

    key: str
    tag: str
    values: Sequence[str]
    """The value of each run, as text; empty if a run has no such key."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs that are compared."""

    name: str
    folder: str
    status: str
    is_faded: bool = False
    """Whether the run ended early: pruned, failed or not run."""
    command: str = ""
    """The command that trains it again; empty if no file has it."""
    metrics: Mapping[str, float]
    seconds: float | None = None
    usd_s: float | None = None
    """US dollars per second of its training; None: unknown."""
    steps: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """The keys that distinguish it from the others, as text."""
    rows: LoggedRows


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that are compared."""

    title: str
    goal: MonitoredMetric
    runs: Sequence[ComparedRun]
    differences: Sequence[DifferingKey]
    is_sweep: bool = False
    notes: Sequence[str] = ()


def comparison_page(comparison: Comparison) -> str:
    """Return the page, with the best 1,000 runs by the metric, and the curves of the best 200."""
    runs, goal = comparison.runs, comparison.goal
    best = sorted(range(len(runs)), key=lambda index: _rank(runs[index], goal))
    chosen, drawn = sorted(best[:_MOST_RUNS]), {*best[:_MOST_DRAWN]}
    shown = [(position, runs[index].rows) for position, index in enumerate(chosen) if index in drawn]
    data = cleaned(_document(comparison, chosen))
    data["curves"] = [
        {
            "name": cleaned(name),
            "runs": [{"run": position, **_curve(rows, name)} for position, rows in shown if name in rows.curves],
        }
        for name in _names(comparison)
    ]
    return make_page(data, scripts=SCRIPTS)


def _rank(run: ComparedRun, goal: MonitoredMetric) -> tuple[bool, bool, float]:
    """Return the sort key of a run: by the metric; runs without it and runs that ended early come last."""
    value = number(run.metrics.get(goal.metric))
    return run.is_faded, value is None, 0.0 if value is None else goal.sign * value


def _notes(comparison: Comparison) -> Iterator[str]:
    yield from comparison.notes
    number_of, metric = len(comparison.runs), comparison.goal.metric
    for most, subject in ((_MOST_RUNS, "only"), (_MOST_DRAWN, "the curves of")):
        if number_of > most:
            yield f"Of {number_of:,} runs, {subject} the {most:,} best by {metric} are shown."


def _document(comparison: Comparison, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the content of the page without its curves, of the runs at the indices `chosen`."""
    ordered = sorted(comparison.differences, key=lambda difference: _ORDER.index(difference.tag))
    tags = {difference.key: difference.tag for difference in ordered}
    return {
        "version": 1,
        "kind": "sweep" if comparison.is_sweep else "comparison",
        "title": comparison.title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "sentence": sentence(comparison),
        "goal": asdict(comparison.goal),
        "columns": [*tags],
        "differences": [
            {"key": difference.key, "tag": difference.tag, "values": [difference.values[index] for index in chosen]}
            for difference in ([] if comparison.is_sweep else ordered)
        ],
        "tags": tags,
        "runs": [_run(comparison.runs[index], comparison.goal, tags) for index in chosen],
        "notes": [*_notes(comparison)],
    }


def sentence(comparison: Comparison) -> str:
    """Return in one sentence whether the differences can change the result.

    Example:
        >>> goal = MonitoredMetric(metric="val/loss", mode="min")
        >>> runs = [
        ...     ComparedRun(name=name, folder=name, status="finished", metrics={}, rows=LoggedRows()) for name in "ab"
        ... ]
        >>> seed = DifferingKey(key="seed", tag="maths", values=("0", "1"))
        >>> sentence(Comparison(title="", goal=goal, runs=runs, differences=[seed]))
        'a and b differ in 1 key that can change the result.'
    """
    runs = comparison.runs
    names = f"{runs[0].name} and {runs[1].name}" if len(runs) == 2 else None
    whole = names or f"{'The' if comparison.is_sweep else 'These'} {len(runs)} runs"
    matter = sum(difference.tag == Tag.maths.value for difference in comparison.differences)
    if not comparison.differences:
        return f"{whole} differ in no key."
    if not matter:
        return f"{whole} differ in no key that can change the result beyond rounding."
    return f"{whole} differ in {matter} key{'' if matter == 1 else 's'} that can change the result."


def _run(run: ComparedRun, goal: MonitoredMetric, columns: Mapping[str, str]) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in ("name", "folder", "status", "command", "steps")},
        "faded": run.is_faded,
        "value": number(run.metrics.get(goal.metric)),
        "seconds": number(run.seconds),
        "usd_s": number(run.usd_s),
        "settings": {key: value for key, value in run.settings.items() if key in columns},
    }


def _names(comparison: Comparison) -> list[str]:
    """Return the metrics whose curves are shown, the monitored one and the losses first."""
    goal = comparison.goal.metric
    names = dict.fromkeys(name for run in comparison.runs for name in run.rows.curves)
    if len(comparison.runs) > _FEW:
        names = {name: None for name in names if name in (goal, "train/loss")}
    return sorted(names, key=lambda name: (name != goal, "loss" not in name))[:_MOST_METRICS]


def _curve(rows: LoggedRows, name: str) -> dict[str, Any]:
    curve = rows.curves[name]
    points = curve.points(_POINTS)
    compact = compact_curve(points, curve.num_points)
    for unit, clock in rows.clock.items():
        compact[unit] = column(_interpolated(points, clock.points()), digits=6)
    return compact


def _interpolated(points: Sequence[Point], clock: Sequence[Point]) -> list[float]:
    """Return the reading of a clock at each point, interpolated between the rows that have one."""
    readings, index = [], 0
    for step, _ in points:
        while index + 1 < len(clock) and clock[index + 1][0] <= step:
            index += 1
        start, value = clock[index][0], clock[index][1] or 0.0
        if index + 1 < len(clock) and clock[index + 1][0] > start:
            end, later = clock[index + 1][0], clock[index + 1][1] or 0.0
            value += (later - value) * min(1.0, max(0.0, (step - start) / (end - start)))
        readings.append(value)
    return readings
