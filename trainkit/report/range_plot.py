"""The plot of a learning-rate range test. Imports matplotlib: for the drawing process only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE, save
from trainkit.report.numbers import figure

_ROOM: Final = 0.15
"""The share of the curve's height that is left free above its first value and below its least one."""


def draw_range(
    path: Path,
    *,
    title: str,
    points: Sequence[Mapping[str, float]],
    steepest: Mapping[str, Any] | None,
    tenth_of_minimum: Mapping[str, Any] | None,
) -> None:
    """Draw the loss over the learning rate, with a line at each suggested rate, into a PNG.

    The axis of the loss ends where the loss has returned to twice its fall: a loss that diverges goes out of it.
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
