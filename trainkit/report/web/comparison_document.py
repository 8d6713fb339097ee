"""What the page that compares runs shows, as JSON: a few runs beside each other, or all jobs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from trainkit.config.schema import MonitoredMetric
from trainkit.fields import Tag
from trainkit.redaction import mask
from trainkit.report.web.curves import LoggedRows, Point, number
from trainkit.report.web.page import COMPARISON_BYTES, compact_curve, fit, make_page, printable

SCRIPTS: Final = ("dom.js", "charts.js", "paper.js", "coordinates.js", "comparison.js")
_POINTS: Final = (2_000, 1_000, 500, 250, 100, 40, 12, 4)
_FEW: Final = 8
"""Runs up to which every metric is drawn; of more runs, the monitored metric and the training loss."""
_MOST_METRICS: Final = 40
_ORDER: Final = tuple(tag.value for tag in (Tag.maths, Tag.placement, Tag.speed, Tag.cosmetic))


@dataclass(frozen=True, kw_only=True)
class DifferingKey:
    """A key in which the runs differ."""

    key: str
    tag: str
    values: Sequence[str]
    """The value of each run, as text; empty where a run has no such key."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs that are compared."""

    name: str
    folder: str
    status: str
    is_faded: bool = False
    """Whether it was ended before its time: pruned, failed or not run."""
    command: str = ""
    """The command that trains it once more."""
    metrics: Mapping[str, float]
    seconds: float | None = None
    steps: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """The keys in which it differs from the others, as text."""
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
    """Return the page, of at most 1 MB: its curves have fewer points where they are many."""
    data = comparison_document(comparison)

    def page(most: int) -> str:
        shown = {**data, "curves": curves_of(comparison, most), "points": most}
        return make_page(data["title"], shown, scripts=SCRIPTS)

    def least(most: int) -> int:
        shown = [run.rows.curves.get(name) for name in _names(comparison) for run in comparison.runs]
        return sum(6 * len(curve.points(most)) for curve in shown if curve is not None)  # value, samples and seconds

    return fit(page, limit=COMPARISON_BYTES, points=_POINTS, least=least)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return what the page shows, without its curves."""
    ordered = sorted(comparison.differences, key=lambda one: _ORDER.index(one.tag))
    return {
        "version": 1,
        "kind": "sweep" if comparison.is_sweep else "comparison",
        "title": printable(comparison.title),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "sentence": printable(sentence(comparison), 600),
        "goal": {"metric": printable(comparison.goal.metric), "mode": comparison.goal.mode},
        "columns": [printable(one.key, 200) for one in ordered],
        "differences": [
            {"key": printable(one.key), "tag": one.tag, "values": [printable(mask(text)) for text in one.values]}
            for one in ([] if comparison.is_sweep else ordered)
        ],
        "tags": {printable(one.key, 200): one.tag for one in ordered},
        "runs": [_run(one, comparison.goal) for one in comparison.runs],
        "notes": [printable(mask(text)) for text in comparison.notes],
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


def _run(one: ComparedRun, goal: MonitoredMetric) -> dict[str, Any]:
    return {
        "name": printable(one.name, 200),
        "folder": printable(one.folder),
        "status": printable(one.status, 60),
        "faded": one.is_faded,
        "command": printable(mask(one.command), 2_000),
        "value": number(one.metrics.get(goal.metric)),
        "seconds": number(one.seconds),
        "steps": one.steps,
        "settings": {printable(key, 200): printable(mask(value), 200) for key, value in one.settings.items()},
    }


def curves_of(comparison: Comparison, most: int) -> list[dict[str, Any]]:
    """Return the curves of the runs by metric, each point with the samples and seconds of its step."""
    return [
        {
            "name": printable(name),
            "runs": [
                {"run": place, **_curve(run.rows, name, most)}
                for place, run in enumerate(comparison.runs)
                if name in run.rows.curves
            ],
        }
        for name in _names(comparison)
    ]


def _names(comparison: Comparison) -> list[str]:
    """Return the metrics whose curves are shown, the monitored one and the losses first."""
    goal = comparison.goal.metric
    known = dict.fromkeys(name for run in comparison.runs for name in run.rows.curves)
    if len(comparison.runs) > _FEW:
        known = {name: None for name in known if name in (goal, "train/loss")}
    return sorted(known, key=lambda name: (name != goal, "loss" not in name))[:_MOST_METRICS]


def _curve(rows: LoggedRows, name: str, most: int) -> dict[str, Any]:
    curve = rows.curves[name]
    points = curve.points(most)
    found = compact_curve(points, curve.seen)
    for unit, clock in rows.clock.items():
        found[unit] = _along(points, clock.points())
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
        found.append(float(f"{value:.6g}"))
    return found
