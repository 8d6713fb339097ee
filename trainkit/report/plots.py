"""Plots of a run and of measurements: classes and samples, distributions, the speed of choices, a range test, the gain
of more replicas.

Imports matplotlib: for the drawing process only.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from trainkit.bounded import parse_json
from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE, save
from trainkit.report.numbers import compact, evenly, figure

_MOST_NUMBERS: Final = 26
"""Up to this many classes, each cell shows its number."""
_MOST_NAMES: Final = 60
"""Up to this many classes, each has a label."""
_PICTURES: Final = 8


def draw_confusion(path: Path, *, title: str, classes: Sequence[str], counts: Sequence[Sequence[float]]) -> None:
    """Draw a confusion matrix: one row per true class, coloured by the share of its samples.

    Args:
        path: the PNG.
        title: title of the figure.
        classes: names, in the order of rows and columns.
        counts: samples of each true class that were predicted as each class.
    """
    matrix = np.asarray(counts, np.float64)
    size = len(classes)
    total = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, total, out=np.zeros_like(matrix), where=total > 0)
    side = min(max(4.0, 1.6 + 0.42 * size), 9.0)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        chart = Figure(figsize=(side + 0.9, side), dpi=110, layout="constrained")
        axes = chart.subplots()
        shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        hits = matrix.trace() / matrix.sum() if matrix.sum() else 0.0
        words = f"{textwrap.fill(title, round(13 * side))}\n{100 * hits:.1f} % on the diagonal"
        chart.suptitle(words, x=0.01, ha="left", fontsize=9, color=INK)
        axes.set_xlabel("guess")
        axes.set_ylabel("class")
        if size <= _MOST_NAMES:
            names = [_short(name, 14) for name in classes]
            longest = max(map(len, names))
            axes.set_xticks(range(size), names, fontsize=min(9, 360 / size))
            axes.tick_params(axis="x", rotation=90 if longest > 3 and size > 4 else 0)
            axes.set_yticks(range(size), names, fontsize=min(9, 360 / size))
        if size <= _MOST_NUMBERS:
            _write_numbers(axes, matrix, shares)
        for side_name in ("left", "bottom"):
            axes.spines[side_name].set_visible(False)
        axes.tick_params(length=0)
        bar = chart.colorbar(shown, ax=axes, shrink=0.7, format=lambda value, _: f"{100 * value:.0f} %")
        bar.set_label("share of the class", color=GREY)
        bar.outline.set_visible(False)
        save(chart, path)


def _write_numbers(axes: mpl.axes.Axes, matrix: np.ndarray, shares: np.ndarray) -> None:
    points = min(9.0, 170 / len(matrix))
    for row, column in zip(*np.nonzero(matrix), strict=True):
        colour = "white" if shares[row, column] > 0.55 else INK
        text = compact(matrix[row, column]).replace(" ", "")
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=points)


def draw_samples(path: Path, *, title: str, samples: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Draw images with captions, eight in a row.

    Args:
        path: the PNG.
        title: title of the figure.
        samples: a PNG in base64 and the lines of its caption, in the order to show them.
    """
    columns = min(_PICTURES, len(samples))
    rows = -(-len(samples) // columns)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        chart = Figure(figsize=(max(4.5, 1.12 * columns), 0.5 + 1.65 * rows), dpi=110, layout="constrained")
        chart.suptitle(title, x=0.01, ha="left", fontsize=9, color=INK)
        grid = chart.subplots(rows, columns, squeeze=False)
        for axes in grid.flat:
            axes.axis("off")
        for axes, (png, caption) in zip(grid.flat, samples, strict=False):
            picture = imread(io.BytesIO(base64.b64decode(png)), format="png")
            axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            words = "\n".join(_short(line, 18) for line in caption)
            axes.set_title(words, fontsize=7, color=INK, pad=3)
        save(chart, path)


KINDS: Final = {"gradients": BLUE, "activations": ORANGE, "weights": "#2e8b57"}
_NUM_QUANTILES: Final = 5
_COLUMNS: Final = 4
_MOST_PANELS: Final = 24
_MOST_STEPS: Final = 300
"""Records that a panel draws; if there are more, some at equal distances."""


@dataclass
class _Layer:
    steps: list[float] = field(default_factory=list)
    quantiles: list[Sequence[float]] = field(default_factory=list)
    """The magnitudes that 5, 25, 50, 75 and 95 % of the values do not exceed, at each step."""
    largest: list[float] = field(default_factory=list)


def read_histograms(lines: Iterable[bytes | str]) -> dict[str, dict[str, _Layer]]:
    """Read kind -> layer -> its quantiles from the lines of `histograms.jsonl`; lines that are not records are skipped.

    Example:
        >>> line = '{"step": 1, "weights": {"fc": {"largest": 2.0, "quantiles": [0, 1, 1, 1, 2]}}}'
        >>> read_histograms([line, "{"])["weights"]["fc"].quantiles
        [[0.0, 1.0, 1.0, 1.0, 2.0]]
    """
    found: dict[str, dict[str, _Layer]] = {}
    for line in lines:
        try:
            row = parse_json(line)
            step = float(row["step"])
            for kind in KINDS:
                for name, one in row.get(kind, {}).items():
                    if one["quantiles"] is None:
                        continue
                    quantiles, largest = [float(value) for value in one["quantiles"]], float(one["largest"])
                    if len(quantiles) != _NUM_QUANTILES or not all(map(math.isfinite, (step, largest, *quantiles))):
                        continue
                    layer = found.setdefault(kind, {}).setdefault(str(name), _Layer())
                    layer.steps.append(step)
                    layer.quantiles.append(quantiles)
                    layer.largest.append(largest)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def draw_histograms(folder: Path, *, title: str, lines: Iterable[bytes | str]) -> list[Path]:
    """Draw a plot of each kind: one panel per layer, with the quantiles of the magnitudes of its values over the steps.

    Returns:
        The files written.
    """
    written = []
    for kind, layers in read_histograms(lines).items():
        with mpl.rc_context({**STYLE, "font.size": 8}):
            chart = _figure(title, kind, layers)
            save(chart, folder / f"{kind}.png")
        written.append(folder / f"{kind}.png")
    return written


def _figure(title: str, kind: str, layers: Mapping[str, _Layer]) -> Figure:
    shown = evenly(list(layers.items()), _MOST_PANELS)
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    chart = Figure(figsize=(max(5.2, 2.6 * columns), 0.75 + 1.65 * rows), dpi=110, layout="constrained")
    more = "" if len(shown) == len(layers) else f", {len(shown)} of {len(layers)} layers"
    chart.suptitle(f"{title}: magnitude of {kind}{more}", x=0.01, ha="left", fontweight="bold", fontsize=10, color=INK)
    low, high = _range([layer for _, layer in shown])
    grid = chart.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (name, layer) in zip(grid.flat, shown, strict=False):
        _panel(axes, name, layer, KINDS[kind], low)
    for axes in grid.flat:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
        axes.yaxis.set_minor_locator(NullLocator())
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    words = "band: 5 to 95 % of the values, darker 25 to 75 %; line: median; dots: largest"
    chart.supxlabel(f"step       {words}", fontsize=8, color=GREY)
    return chart


def _panel(axes: Axes, name: str, layer: _Layer, colour: str, low: float) -> None:
    places = evenly(list(range(len(layer.steps))), _MOST_STEPS)
    steps = [layer.steps[place] for place in places]
    bands = [[max(layer.quantiles[place][at], low) for place in places] for at in range(5)]
    largest = [layer.largest[place] for place in places]
    if len(steps) == 1:  # one record has no width
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        bands, largest = [band * 2 for band in bands], largest * 2
    axes.fill_between(steps, bands[0], bands[4], color=colour, alpha=0.18, linewidth=0)
    axes.fill_between(steps, bands[1], bands[3], color=colour, alpha=0.35, linewidth=0)
    axes.plot(steps, bands[2], color=colour, linewidth=1.4)
    axes.plot(steps, largest, color=GREY, linewidth=0.9, linestyle=":")
    axes.set_title(name if len(name) <= 30 else f"...{name[-27:]}", loc="left", fontsize=8, pad=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value).replace(" ", "")))
    axes.margins(x=0.02)


def _range(layers: Sequence[_Layer]) -> tuple[float, float]:
    """Return the limits of the axis that all panels share: at most six decades below the largest value."""
    largest = [value for layer in layers for value in layer.largest if value > 0]
    lowest = [value for layer in layers for row in layer.quantiles for value in row if value > 0]
    if not largest or not lowest:
        return 1e-3, 1.0
    high = max(largest) * 1.6
    return max(min(lowest) / 1.6, 10 ** (math.log10(high) - 6)), high


_COLOURS: Final = ("#d9a441", BLUE, "#17356b", ORANGE, "#5aa469", "#c2c6cc")
"""A colour for each part of a step, in their order."""
_MOST: Final = 44
"""Limit of the characters of a label."""

Row = Mapping[str, Any]
"""An entry of `choices` in bench.json."""


def draw_bench(path: Path, *, title: str, choices: Sequence[Row]) -> None:
    """Draw the choices of a measurement, in their order, into a PNG."""
    shown = [one for one in choices if one["samples_per_s"] is not None]
    height = 1.9 + 0.55 * max(len(shown), 1)
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.4 / height))
        chart = Figure(figsize=(10.0, height), dpi=140, layout=layout)
        chart.text(0.012, 1 - 0.1 / height, _short(title, 100), va="top", fontweight="bold", fontsize=11)
        left, right = chart.subplots(1, 2, sharey=True)
        _draw_speed(left, shown)
        _draw_parts(right, shown)
        left.set_yticks(range(len(shown)), [_short(one["label"]) for one in shown])
        left.tick_params(axis="y", length=0, labelcolor=INK)
        left.invert_yaxis()
        chart.legend(loc="outside lower center", ncols=len(_COLOURS), fontsize=8.5, labelcolor=GREY)
        for axes in (left, right):
            axes.grid(visible=False, axis="y")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
        save(chart, path)


def _draw_speed(axes: Axes, shown: Sequence[Row]) -> None:
    """Draw the median speed of each choice, and its range over the turns."""
    for place, one in enumerate(shown):
        speed = one["samples_per_s"]
        axes.barh(place, speed["median"], height=0.55, color=BLUE, alpha=0.9)
        axes.plot([speed["low"], speed["high"]], [place, place], color=INK, linewidth=1.6)
    axes.set_xlabel("samples/s, and its range")


def _draw_parts(axes: Axes, shown: Sequence[Row]) -> None:
    """Draw the parts of the step of each choice, one after the other."""
    names = list(shown[0]["parts_s"]) if shown else []
    ends = [0.0] * len(shown)
    for name, colour in zip(names, _COLOURS, strict=True):
        widths = [1e3 * one["parts_s"][name]["median"] for one in shown]
        axes.barh(range(len(shown)), widths, left=ends, height=0.55, color=colour, label=name)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_xlabel("milliseconds a step")


def _short(text: str, most: int = _MOST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_ROOM: Final = 0.15
"""The share of the curve's height that is left free above its first value and below its minimum."""


def draw_range(
    path: Path,
    *,
    title: str,
    points: Sequence[Mapping[str, float]],
    steepest: Mapping[str, Any] | None,
    tenth_of_minimum: Mapping[str, Any] | None,
) -> None:
    """Draw the loss over the learning rate, with a line at each suggested rate, into a PNG.

    The axis of the loss ends at twice the fall of the loss above its minimum, so a diverging loss leaves the plot.
    """
    rates = [point["lr"] for point in points]
    smoothed = [point["smoothed"] for point in points]
    with mpl.rc_context(STYLE):
        chart = Figure(figsize=(7.2, 4.2), dpi=140, layout="constrained")
        axes = chart.subplots()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.plot(rates, [point["loss"] for point in points], color=GREY, linewidth=0.8, alpha=0.6, label="loss")
        axes.plot(rates, smoothed, color=BLUE, linewidth=2, label="smoothed")
        suggested = {"steepest": (steepest, ORANGE), "a tenth of the minimum's rate": (tenth_of_minimum, INK)}
        for name, (rate, colour) in suggested.items():
            if rate is not None:
                label = f"{name}: {figure(rate['lr'])}"
                axes.axvline(rate["lr"], color=colour, linewidth=1.4, linestyle="--", label=label)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        finite = [value for value in smoothed if math.isfinite(value)]
        if finite:
            first, least = finite[0], min(finite)
            height = (first - least) or abs(first) or 1.0
            axes.set_ylim(least - _ROOM * height, first + (1 + _ROOM) * height)
        axes.legend(loc="upper left", fontsize=8.5, labelcolor=GREY)
        save(chart, path)


def draw_scale(
    path: Path, *, title: str, predictions: Sequence[Row], checks: Sequence[Row], knee: Mapping[str, float] | None
) -> None:
    """Draw speed-up, efficiency and cost over the replicas into a PNG, with a line at the knee."""
    counts = [one["replicas"] for one in predictions]
    lines = {
        "speed-up": [one["speedup"]["middle"] for one in predictions],
        "efficiency": [one["efficiency"] for one in predictions],
        "cost of a million samples": [one["cost_per_million"] for one in predictions],
    }
    shown = {label: values for label, values in lines.items() if None not in values}
    predicted = {one["replicas"]: one["speedup"]["middle"] * one["step_s"] for one in predictions}
    with mpl.rc_context(STYLE):
        chart = Figure(figsize=(4.4 * len(shown), 3.8), layout="constrained", dpi=150)
        panels = chart.subplots(1, len(shown))
        for axes, (label, values) in zip(panels, shown.items(), strict=True):
            axes.plot(counts, values, color=BLUE, linewidth=2, marker=".", markersize=5)
            axes.set_ylim(0, 1.05 * max(values))
            if knee is not None:
                axes.axvline(knee["middle"], color=ORANGE, linewidth=1.2, linestyle=(0, (2, 2)), label="knee")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
            axes.set_xlabel("replicas")
            axes.set_title(label, fontsize=10, loc="left", color=INK)
        low, high = ([one["speedup"][end] for one in predictions] for end in ("low", "high"))
        panels[0].fill_between(counts, low, high, color=BLUE, alpha=0.18, linewidth=0)
        panels[0].plot(
            counts, counts, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="each as much as the first"
        )
        measured = [(one["replicas"], predicted[one["replicas"]] / one["measured_s"]) for one in checks]
        if measured:
            panels[0].plot(*zip(*measured, strict=True), "o", color=ORANGE, markersize=6, label="measured", zorder=4)
        panels[0].set_ylim(0.9 * min(low), 1.1 * max(counts))
        panels[0].set_yscale("log", base=2)
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
        panels[0].yaxis.set_minor_formatter(NullFormatter())
        panels[0].legend(fontsize=8.5)
        chart.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
        save(chart, path)
