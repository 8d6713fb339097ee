"""Plots of a run: their data and their appearance. Imports matplotlib: for the drawing process only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from trainkit.bounded import expect_map, parse_json
from trainkit.report.numbers import compact, figure

mpl.use("Agg")

BLUE, ORANGE, GREY, INK = "#2f6fde", "#e8743b", "#8a8f98", "#22252b"
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names of metrics, layers and classes are text, with $ as well
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#c9ccd1",
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}
_SIDES = ("train", "val")
"""The splits of a metric that are drawn; a strategy's own numbers, such as `pipeline/bubble`, are not metrics."""
_MOST_POINTS = 1500
"""Limit of the points of a curve, above the width of a plot in pixels; longer curves are averaged in buckets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values over steps, in the order of the steps."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Create a curve from pairs of step and value; a NaN leaves a gap."""
        pairs = np.asarray(points, np.float64).reshape(-1, 2)
        return cls(steps=pairs[:, 0], values=pairs[:, 1])

    def thinned(self) -> Curve:
        """Return the same curve with at most `_MOST_POINTS` points, each a mean of neighbours."""
        size = -(-len(self.steps) // _MOST_POINTS)
        if size <= 1:
            return self
        starts = np.arange(0, len(self.steps), size)
        lengths = np.diff(np.append(starts, len(self.steps)))
        mean_step = np.add.reduceat(self.steps, starts) / lengths
        return Curve(steps=mean_step, values=np.add.reduceat(self.values, starts) / lengths)

    def smoothed(self, share: float = 0.02) -> Curve:
        """Return the mean of the points within a symmetric window of this fraction of the curve.

        If all values are positive, the geometric mean is used: a loss falls through orders of magnitude, and the
        arithmetic mean of such a fall lies above it.
        """
        known = np.isfinite(self.values)
        geometric = bool(known.any()) and float(self.values[known].min()) > 0
        values = np.where(known, self.values, 1.0)
        sums = _running(np.log(values) if geometric else np.where(known, values, 0.0))
        counts = _running(known)
        count = len(values)
        at, reach = np.arange(count), max(1, round(count * share))
        # The window shrinks symmetrically at the ends, so that the curve starts and ends where the points do.
        half = np.minimum(np.minimum(at, count - 1 - at), reach)
        number = counts[at + half + 1] - counts[at - half]
        mean = (sums[at + half + 1] - sums[at - half]) / np.maximum(number, 1)
        return Curve(steps=self.steps, values=np.where(number > 0, np.exp(mean) if geometric else mean, np.nan))


def _running(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sums of the first 0, 1, 2 ... values."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


def read_curves(rows: Iterable[str | bytes]) -> dict[str, Curve]:
    """Read curves by name from the lines of `metrics.jsonl`; a truncated last line is skipped.

    Example:
        >>> curves = read_curves(['{"step": 1, "train/loss": 2.0}', '{"step": 2, "train/loss": 1.0}', '{"st'])
        >>> curves["train/loss"].values.tolist()
        [2.0, 1.0]
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for line in rows:
        try:
            row = expect_map(parse_json(line), {"step": float})
        except ValueError:
            continue
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float | None):
                points.setdefault(name, []).append((row["step"], math.nan if value is None else value))
    return {name: Curve.of(pairs) for name, pairs in points.items()}


def draw_lr(path: Path, *, title: str, rates: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw the learning rate of the whole run: one curve for each optimizer, by name."""
    curves = {name: Curve.of(points) for name, points in rates.items()}
    highest = max(float(np.nan_to_num(curve.values).max(initial=0.0)) for curve in curves.values())
    with mpl.rc_context(STYLE):
        axes = _axes(title, "learning rate")
        axes.set_ylim(0, highest * 1.12 or 1.0)
        for (name, curve), colour in zip(curves.items(), cycle((BLUE, ORANGE, GREY, INK)), strict=False):
            axes.plot(curve.steps, curve.values, color=colour, linewidth=2, label=name)
            if np.isfinite(curve.values).any():
                peak = int(np.nanargmax(curve.values))
                _mark(axes, curve.steps[peak], curve.values[peak], f"peak {figure(curve.values[peak])}", colour)
        if len(curves) == 1:
            axes.fill_between(curve.steps, curve.values, color=BLUE, alpha=0.08, linewidth=0)
        else:
            axes.legend(loc="best")
        save(_chart(axes), path)


def draw_metrics(folder: Path, *, title: str, lines: Iterable[bytes | str], modes: Mapping[str, str]) -> list[Path]:
    """Draw one plot for each metric, training and validation together.

    Args:
        folder: the folder for `loss.png`, `accuracy.png` ...
        title: the run's name.
        lines: those of `metrics.jsonl`.
        modes: `min` or `max` for metrics whose better direction is known, by name; losses are `min`.

    Returns:
        The files written.
    """
    written, curves = [], read_curves(lines)
    for metric in sorted({metric for side, _, metric in (name.partition("/") for name in curves) if side in _SIDES}):
        path = folder / f"{metric.replace('/', '_')}.png"
        others = [name.partition("/")[0] for name in curves if name.startswith("val_") and name.endswith(f"/{metric}")]
        split = {side: curve for side in _SIDES if (curve := curves.get(f"{side}/{metric}")) is not None}
        with mpl.rc_context(STYLE):
            axes = _axes(title, metric)
            _draw_train(axes, split.get("train"))
            _draw_val(axes, split.get("val"), modes.get(f"val/{metric}", "min" if "loss" in metric else None))
            for side in others:
                split[side] = curve = curves[f"{side}/{metric}"]
                axes.plot(curve.steps, curve.values, linewidth=1.2, label=side)
            _scale(axes, metric, [curve.values for curve in split.values()])
            if len(split) > 1:
                axes.legend(loc="best")
            save(_chart(axes), path)
        written.append(path)
    return written


def _draw_train(axes: Axes, curve: Curve | None) -> None:
    if curve is None:
        return
    thin = curve.thinned()
    if len(thin.steps) < 20:
        axes.plot(thin.steps, thin.values, color=BLUE, linewidth=1.8, label="train")
        return
    smooth = thin.smoothed()
    axes.plot(thin.steps, thin.values, color=BLUE, linewidth=0.8, alpha=0.3)
    axes.plot(smooth.steps, smooth.values, color=BLUE, linewidth=1.8, label="train")


def _draw_val(axes: Axes, curve: Curve | None, mode: str | None) -> None:
    if curve is None:
        return
    dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(curve.steps) <= 40 else {}
    axes.plot(curve.steps, curve.values, color=ORANGE, linewidth=1.8, label="val", **dots)
    if mode is not None and np.isfinite(curve.values).any():
        best = int(np.nanargmin(curve.values) if mode == "min" else np.nanargmax(curve.values))
        _mark(axes, curve.steps[best], curve.values[best], f"best {figure(curve.values[best])}", ORANGE)


def _scale(axes: Axes, metric: str, values: Sequence[NDArray[np.float64]]) -> None:
    """Use a logarithmic axis for a loss that falls by more than a factor of ten."""
    finite = np.concatenate([part[np.isfinite(part)] for part in values])
    if "loss" in metric and len(finite) and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))


def _axes(title: str, y_label: str) -> Axes:
    axes = Figure(figsize=(7.2, 4.0), dpi=140, layout="constrained").subplots()
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    return axes


def _tick(step: float) -> str:
    """Return a step as a short text.

    Example:
        >>> [_tick(x) for x in (0, 800, 1600, 20_000, 1_500_000)]
        ['0', '800', '1.6k', '20k', '1.5M']
    """
    number, _, suffix = compact(step).partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + suffix


def _mark(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Mark a point with a circle and a label inside the axes."""
    axes.plot([x], [y], "o", color="white", markeredgecolor=colour, markeredgewidth=1.8, markersize=7, zorder=5)
    low, high = axes.get_xlim()
    place = (x - low) / (high - low)
    side, shift = ("left", -4) if place < 0.1 else ("right", 4) if place > 0.9 else ("center", 0)
    axes.annotate(text, (x, y), (shift, 9), textcoords="offset points", ha=side, color=colour, fontweight="bold")


def _chart(axes: Axes) -> Figure:
    chart = axes.get_figure(root=True)
    assert chart is not None
    return chart


def save(chart: Figure, path: Path) -> None:
    """Write to a temporary file and rename it, so that no reader sees an incomplete picture."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    chart.savefig(partial, format="png")
    partial.replace(path)
