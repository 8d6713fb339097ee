"""The plot of a sweep: every job as a line through its settings to its metric, and the metric against each setting.

Imports matplotlib: for the drawing process only.

Source: Inselberg 1985, doi:10.1007/BF01898350 (parallel coordinates).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE, save
from trainkit.report.numbers import figure

_MOST_KEYS: Final = 8
"""Limit of the axes; more cannot be distinguished."""
_COLUMNS: Final = 3
_SHADES: Final = LinearSegmentedColormap.from_list("shades", ["#d3e0f7", BLUE, "#17356b"])

Job = Mapping[str, Any]
"""label, value (None without a metric), status, settings: key -> value as typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One setting, or the metric: maps its values to positions between 0 and 1.

    Example:
        >>> axis = Axis.of("optimizer.lr", ["0.001", "0.1", "0.01"])
        >>> axis.kind, [round(axis.place(text), 3) for text in ("0.001", "0.01", "0.1")]
        ('log', [0.0, 0.5, 1.0])
        >>> Axis.of("model.hidden", ["[128]", "[32]", "[64]"]).names
        ('[32]', '[64]', '[128]')
    """

    name: str
    kind: Literal["linear", "log", "names"]
    names: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, name: str, values: Sequence[str]) -> Axis:
        """Return the axis for values as typed: linear for numbers, logarithmic if they span a magnitude, else
        by name.
        """
        numbers = [_number(text) for text in values]
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return cls(name=name, kind="names", names=tuple(sorted(set(values), key=_natural)))
        low, high = min(known), max(known)
        return cls(name=name, kind="log" if low > 0 and high >= 10 * low else "linear", low=low, high=high)

    def place(self, text: str) -> float:
        """Return the position of a value, from 0 to 1."""
        if self.kind == "names":
            return self.names.index(text) / max(1, len(self.names) - 1) if len(self.names) > 1 else 0.5
        value = float(text)
        if self.high == self.low:
            return 0.5
        if self.kind == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, values: Sequence[str]) -> list[tuple[float, str]]:
        """Return tick positions and labels: every value if they are few, else numbers at even intervals."""
        if self.kind == "names":
            return [(self.place(name), _short(name)) for name in self.names]
        distinct = sorted({float(text) for text in values})
        if len(distinct) > 6:
            distinct = [self._at(place / 4) for place in range(5)]
        return [(self.place(repr(value)), figure(value)) for value in distinct]

    def _at(self, place: float) -> float:
        if self.kind == "log":
            return float(self.low * (self.high / self.low) ** place)
        return self.low + place * (self.high - self.low)


def draw_sweep(path: Path, *, title: str, metric: str, mode: str, jobs: Sequence[Job]) -> None:
    """Draw the jobs of a sweep, best first, into a PNG: the settings of each, and its metric if it has one."""
    keys = _varied(jobs) or ["job"]
    jobs = [{**job, "settings": {"job": job["label"], **job["settings"]}} for job in jobs]
    parallel = len(keys) > 1
    rows = -(-len(keys) // _COLUMNS)
    columns = min(_COLUMNS, len(keys))
    heights = [*([3.2] if parallel else []), *([2.5] * rows)]
    with mpl.rc_context(STYLE):
        height = sum(heights) + 1.0
        layout = ConstrainedLayoutEngine(h_pad=0.09, hspace=0.03, rect=(0, 0, 1, 1 - 0.62 / height))
        chart = Figure(figsize=(max(7.2, 3.0 * columns), height), dpi=140, layout=layout)
        grid = chart.add_gridspec(len(heights), columns, height_ratios=heights)
        chart.text(0.012, 1 - 0.1 / height, title, va="top", fontweight="bold", fontsize=12)
        chart.text(0.012, 1 - 0.36 / height, _subtitle(metric, mode, jobs), va="top", fontsize=9, color=GREY)
        if parallel:
            _draw_parallel(chart.add_subplot(grid[0, :]), keys, metric, mode, jobs)
        for place, key in enumerate(keys):
            axes = chart.add_subplot(grid[int(parallel) + place // columns, place % columns])
            _draw_key(axes, key, metric, jobs, labelled=place % columns == 0)
        _legend(chart, jobs)
        save(chart, path)


def _varied(jobs: Sequence[Job]) -> list[str]:
    """Return the keys that take several values, in the order of the arguments."""
    keys = dict.fromkeys(key for job in jobs for key in job["settings"])
    return [key for key in keys if len({job["settings"].get(key) for job in jobs}) > 1][:_MOST_KEYS]


def _subtitle(metric: str, mode: str, jobs: Sequence[Job]) -> str:
    best = next((job for job in jobs if job["value"] is not None), None)
    if best is None:
        return ""
    end = "most" if mode == "max" else "least"
    return f"{metric}, {end} is best: {figure(best['value'])} with {_short(best['label'], 90)}"


def _draw_parallel(axes: Axes, keys: Sequence[str], metric: str, mode: str, jobs: Sequence[Job]) -> None:
    """Draw one line per job: through its settings, to its metric."""
    listed = {key: [job["settings"][key] for job in jobs if key in job["settings"]] for key in keys}
    scales = [Axis.of(key, listed[key]) for key in keys]
    values = [job["value"] for job in jobs if job["value"] is not None]
    goal = Axis(name=metric, kind="linear", low=min(values, default=0.0), high=max(values, default=1.0))
    best = next((job for job in jobs if job["value"] is not None), None)
    for job in reversed(jobs):  # the best on top
        points = [
            (place, scale.place(job["settings"][scale.name]))
            for place, scale in enumerate(scales)
            if scale.name in job["settings"]
        ]
        if job["value"] is not None:
            points.append((len(scales), goal.place(repr(job["value"]))))
        axes.plot(*zip(*points, strict=True), **_line(job, goal, mode, best=job is best))
    _draw_scales(axes, scales, listed)
    _draw_scale(axes, len(scales), goal, [repr(value) for value in values], bold=True)
    axes.set_xlim(-0.25, len(scales) + 0.25)
    axes.set_ylim(-0.06, 1.06)
    axes.set_xticks(range(len(scales) + 1), [_short(scale.name, 26) for scale in (*scales, goal)])
    axes.tick_params(axis="x", length=0, labelcolor=INK, pad=8)
    axes.yaxis.set_major_locator(NullLocator())
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _line(job: Job, goal: Axis, mode: str, *, best: bool) -> dict[str, Any]:
    """Return the style of a job's line."""
    if best:
        return {"color": ORANGE, "linewidth": 2.4, "zorder": 4}
    if job["value"] is None:
        return {"color": "#c2c6cc", "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 1}
    if job["status"] == "pruned":
        return {"color": "#b4b9c1", "linewidth": 1.0, "linestyle": (0, (4, 2)), "zorder": 2}
    share = goal.place(repr(job["value"]))
    return {"color": _SHADES(share if mode == "max" else 1 - share), "linewidth": 1.3, "alpha": 0.9, "zorder": 3}


def _draw_scales(axes: Axes, scales: Sequence[Axis], listed: Mapping[str, Sequence[str]]) -> None:
    for place, scale in enumerate(scales):
        _draw_scale(axes, place, scale, listed[scale.name])


def _draw_scale(axes: Axes, place: int, scale: Axis, values: Sequence[str], *, bold: bool = False) -> None:
    axes.plot([place, place], [0, 1], color=INK if bold else "#9aa0a8", linewidth=1.2, zorder=5)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
    for height, text in scale.ticks(values):
        axes.plot([place], [height], marker="_", color=INK, markersize=6, zorder=6)
        shift = (7, 0) if bold else (-6, 0)
        side = "left" if bold else "right"
        axes.annotate(
            text,
            (place, height),
            shift,
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
            bbox=box,
            zorder=7,
        )


def _draw_key(axes: Axes, key: str, metric: str, jobs: Sequence[Job], *, labelled: bool) -> None:
    """Draw the metric of every job against one of its settings."""
    shown = [job for job in jobs if key in job["settings"]]
    texts = [job["settings"][key] for job in shown]
    scale = Axis.of(key, texts)
    best = next((job for job in jobs if job["value"] is not None), None)
    for job, text in zip(shown, texts, strict=True):
        x = scale.names.index(text) if scale.kind == "names" else float(text)
        if job["value"] is None:
            axes.plot([x], [0.03], "x", color=GREY, markersize=6, transform=axes.get_xaxis_transform())
        elif job["status"] == "pruned":
            axes.plot([x], [job["value"]], "o", markerfacecolor="white", markeredgecolor="#9aa0a8", markersize=5.5)
        else:
            colour, size = (ORANGE, 8) if job is best else (BLUE, 5.5)
            axes.plot(
                [x], [job["value"]], "o", color=colour, markersize=size, alpha=0.9, zorder=4 if job is best else 3
            )
    _scale_key(axes, scale, texts)
    axes.set_xlabel(_short(key, 34))
    axes.set_ylabel(metric if labelled else "")
    axes.margins(x=0.1, y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))


def _scale_key(axes: Axes, scale: Axis, texts: Sequence[str]) -> None:
    if scale.kind == "names":
        turned = {"rotation": 20, "ha": "right"} if sum(map(len, scale.names)) > 24 else {}
        axes.set_xticks(range(len(scale.names)), [_short(name, 18) for name in scale.names], **turned)  # type: ignore[arg-type]
        return
    if scale.kind == "log":
        axes.set_xscale("log")
        axes.minorticks_off()
    distinct = sorted({float(text) for text in texts})
    if len(distinct) <= 6:
        axes.set_xticks(distinct, [figure(value) for value in distinct])
    elif scale.kind == "log":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    elif scale.kind == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _legend(chart: Figure, jobs: Sequence[Job]) -> None:
    """Draw the legend of all marks except plain dots."""
    pruned = any(job["status"] == "pruned" for job in jobs)
    without = any(job["value"] is None for job in jobs)
    dot = {"linestyle": "none", "markersize": 6}
    handles = [Line2D([], [], marker="o", color=ORANGE, label="best", **dot)]  # type: ignore[arg-type]
    if pruned:
        look = {"markerfacecolor": "white", "markeredgecolor": "#9aa0a8"}
        handles.append(Line2D([], [], marker="o", label="pruned", **look, **dot))  # type: ignore[arg-type]
    if without:
        handles.append(Line2D([], [], marker="x", color=GREY, label="failed or without a figure", **dot))  # type: ignore[arg-type]
    chart.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5, handletextpad=0.2)


def _natural(text: str) -> list[tuple[float, str]]:
    """Return a sort key by the numbers in a text: [32] before [128]."""
    parts = re.split(r"(\d+)", text)
    return [(float(part), "") if part.isdecimal() else (-1.0, part) for part in parts]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _short(text: str, most: int = 14) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
