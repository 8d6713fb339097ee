"""Plots of the distribution of values over the steps of a run. Imports matplotlib: for the drawing process only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trainkit.bounded import parse_json
from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE, save
from trainkit.report.numbers import compact, evenly, figure

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
    axes.set_title(_short(name), loc="left", fontsize=8, pad=3)
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


def _short(name: str, most: int = 30) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"
