"""Content of the page that compares runs, as JSON: a few runs side by side, or all jobs of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from trainkit.config.schema import MonitoredMetric
from trainkit.fields import Tag
from trainkit.redaction import mask
from trainkit.report.web.commands import printable_command
from trainkit.report.web.curves import LoggedRows, Point, number
from trainkit.report.web.fitting import Draft, Resolution, fit
from trainkit.report.web.packing import column, compact_curve
from trainkit.report.web.page import COMPARISON_BYTES, printable, to_json

SCRIPTS: Final = ("dom.js", "charts.js", "paper.js", "coordinates.js", "comparison.js")
_POINTS: Final = (2_000, 1_000, 500, 250, 100, 40, 12, 4)
_FEW_POINTS: Final = 12
"""Number of points per curve below which other parts are left out first."""
_ALL: Final = 1 << 62
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of the parts of a comparison; the best runs are those by the metric."""

    text: int = 400
    """Largest number of characters of a text; of a key at least 80."""
    commands: int = _ALL
    """Number of best runs with a command."""
    curves: int = _ALL
    """Number of best runs with curves."""
    keys: int = _ALL
    """Number of keys that differ."""
    runs: int = _ALL
    """Number of best runs."""


_LIMITS: Final = (
    Limits(),
    Limits(text=60),
    Limits(text=60, commands=20),
    Limits(text=60, commands=20, curves=200),
    Limits(text=60, commands=20, curves=40),
    Limits(text=60, commands=20, curves=40, keys=40),
    Limits(text=60, commands=20, curves=40, keys=40, runs=1_000),
    Limits(text=20, commands=8, curves=8, keys=12, runs=200),
    Limits(text=20, commands=8, curves=8, keys=6, runs=40),
)
"""Limits for a page that would be too large, in the order in which they are tried."""


def comparison_page(comparison: Comparison) -> str:
    """Return the page, of at most 1 MB: if it is larger, curves have fewer points, and parts are left out."""
    drafts = [partial(_draft, comparison, limits) for limits in _LIMITS]
    return fit(drafts, scripts=SCRIPTS, limit=COMPARISON_BYTES, points=_POINTS, few=_FEW_POINTS)


def _draft(comparison: Comparison, limits: Limits) -> Draft:
    best = sorted(range(len(comparison.runs)), key=lambda place: _rank(comparison.runs[place], comparison.goal))
    kept, drawn = sorted(best[: limits.runs]), {*best[: limits.curves]}
    data = _document(comparison, limits, kept, {*best[: limits.commands]})
    runs = [(at, comparison.runs[place]) for at, place in enumerate(kept) if place in drawn]
    names = _names(comparison)
    return Draft(data=data, curves=lambda resolution: _curves(names, runs, resolution))


def _rank(run: ComparedRun, goal: MonitoredMetric) -> tuple[bool, bool, float]:
    """Return the sort key of a run: by the metric; runs without it and runs that ended early come last."""
    value = number(run.metrics.get(goal.metric))
    return run.is_faded, value is None, 0.0 if value is None else goal.sign * value


def _left_out(comparison: Comparison, limits: Limits) -> str:
    """Return the line that names the parts that the page leaves out."""
    number_of, metric = len(comparison.runs), printable(comparison.goal.metric, 60)
    parts = {
        f"texts after {limits.text} characters": limits.text < Limits().text,
        f"the commands of all but the {limits.commands} best": number_of > limits.commands,
        f"the curves of all but the {limits.curves} best": number_of > limits.curves,
        f"keys that differ after the first {limits.keys}": len(comparison.differences) > limits.keys,
        f"of {number_of:,} runs all but the {limits.runs:,} best by {metric}": number_of > limits.runs,
    }
    left = [words for words, holds in parts.items() if holds]
    return f"Left out, since this page has at most {COMPARISON_BYTES // 1000} KB: {'; '.join(left)}." if left else ""


def _document(
    comparison: Comparison, limits: Limits, kept: Sequence[int], with_command: Collection[int]
) -> dict[str, Any]:
    """Return the content of the page without its curves.

    Args:
        comparison: all runs.
        limits: sizes of the parts.
        kept: indices of the runs on the page.
        with_command: indices of the runs with a command.
    """
    ordered = sorted(comparison.differences, key=lambda one: _ORDER.index(one.tag))[: limits.keys]
    columns = {one.key: printable(one.key, max(80, min(200, limits.text))) for one in ordered}
    return {
        "version": 1,
        "kind": "sweep" if comparison.is_sweep else "comparison",
        "title": printable(comparison.title),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "sentence": printable(sentence(comparison), 600),
        "goal": {"metric": printable(comparison.goal.metric), "mode": comparison.goal.mode},
        "columns": [*columns.values()],
        "differences": [
            {
                "key": printable(one.key),
                "tag": one.tag,
                "values": [printable(mask(one.values[place]), limits.text) for place in kept],
            }
            for one in ([] if comparison.is_sweep else ordered)
        ],
        "tags": {columns[one.key]: one.tag for one in ordered},
        "runs": [
            _run(comparison.runs[place], comparison.goal, columns, limits.text, has_command=place in with_command)
            for place in kept
        ],
        "notes": [printable(mask(text)) for text in comparison.notes],
        "left_out": _left_out(comparison, limits),
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
    names = f"{printable(runs[0].name, 80)} and {printable(runs[1].name, 80)}" if len(runs) == 2 else None
    whole = names or f"{'The' if comparison.is_sweep else 'These'} {len(runs)} runs"
    matter = sum(one.tag == Tag.maths.value for one in comparison.differences)
    if not comparison.differences:
        return f"{whole} differ in no key."
    if not matter:
        return f"{whole} differ in no key that can change the result beyond rounding."
    return f"{whole} differ in {matter} key{'' if matter == 1 else 's'} that can change the result."


def _run(
    one: ComparedRun, goal: MonitoredMetric, columns: Mapping[str, str], longest: int, *, has_command: bool
) -> dict[str, Any]:
    return {
        "name": printable(one.name, min(200, longest)),
        "folder": printable(one.folder, longest),
        "status": printable(one.status, 60),
        "faded": one.is_faded,
        "command": printable_command(one.command) if has_command else "",
        "value": number(one.metrics.get(goal.metric)),
        "seconds": number(one.seconds),
        "usd_s": number(one.usd_s),
        "steps": one.steps,
        "settings": {
            columns[key]: printable(mask(value), min(200, longest))
            for key, value in one.settings.items()
            if key in columns
        },
    }


def _curves(names: Sequence[str], runs: Sequence[tuple[int, ComparedRun]], resolution: Resolution) -> Iterator[str]:
    """Yield the curves by metric as pieces of a JSON list, each point with the samples and seconds of its step.

    Args:
        names: the metrics.
        runs: the runs, each with its place on the page.
        resolution: how much of a curve is shown.
    """
    for number_of, name in enumerate(names):
        yield f'{"," if number_of else ""}{{"name":{to_json(printable(name))},"runs":['
        having = [(place, run) for place, run in runs if name in run.rows.curves]
        for at, (place, run) in enumerate(having):
            yield ("," if at else "") + to_json({"run": place, **_curve(run.rows, name, resolution)})
        yield "]}"


def _names(comparison: Comparison) -> list[str]:
    """Return the metrics whose curves are shown, the monitored one and the losses first."""
    goal = comparison.goal.metric
    known = dict.fromkeys(name for run in comparison.runs for name in run.rows.curves)
    if len(comparison.runs) > _FEW:
        known = {name: None for name in known if name in (goal, "train/loss")}
    return sorted(known, key=lambda name: (name != goal, "loss" not in name))[:_MOST_METRICS]


def _curve(rows: LoggedRows, name: str, resolution: Resolution) -> dict[str, Any]:
    curve, is_packed = rows.curves[name], resolution.is_packed
    points = curve.points(resolution.points)
    found = compact_curve(points, curve.seen, is_packed=is_packed)
    for unit, clock in rows.clock.items():
        found[unit] = column(_along(points, clock.points()), digits=6, is_packed=is_packed)
    return found


def _along(points: Sequence[Point], clock: Sequence[Point]) -> list[float]:
    """Return the reading of a clock at each point, interpolated between the rows that have one."""
    found, at = [], 0
    for step, _ in points:
        while at + 1 < len(clock) and clock[at + 1][0] <= step:
            at += 1
        here, value = clock[at][0], clock[at][1] or 0.0
        if at + 1 < len(clock) and clock[at + 1][0] > here:
            ahead, later = clock[at + 1][0], clock[at + 1][1] or 0.0
            value += (later - value) * min(1.0, max(0.0, (step - here) / (ahead - here)))
        found.append(value)
    return found
