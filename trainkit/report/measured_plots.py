"""Draw plots of measured trainings: the speed of each choice with the parts of its step, a range test, and the gain of
more replicas.

Imports matplotlib: for the drawing process only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE, save
from trainkit.report.numbers import figure

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
