"""Pictures as PNG files: the loss of a run, the learning rate, and what the measuring verbs have found.

Imports matplotlib, which takes 0.3 s: import this module only where a picture is drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from trainkit.report.numbers import compact, figure

BLUE, ORANGE, GREY, INK = "#2f6fde", "#e8743b", "#8a8f98", "#22252b"
_COLOURS: Final = (BLUE, ORANGE, "#5aa469", "#17356b", "#d9a441", GREY)
STYLE: Final[dict[Any, Any]] = {
    "text.parse_math": False,  # names of metrics and arguments are text, with $ as well
    "font.size": 10, "text.color": INK, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.edgecolor": "#c9ccd1", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#eceef1", "legend.frameon": False,
}  # fmt: skip
_ROOM: Final = 0.15
"""The share of the curve's height that is left free above its first value and below its minimum."""

Line = Sequence[tuple[float, float | None]]
"""Places and values; None leaves a gap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A part of a picture: lines over one axis, or bars beside each other."""

    x: str
    """Label of the horizontal axis."""
    y: str = ""
    """Label of the vertical axis."""
    lines: Mapping[str, Line] = field(default_factory=dict)
    """Label -> line; more than one have a legend."""
    marks: Mapping[str, float | None] = field(default_factory=dict)
    """Label -> place of a vertical line; None is left out."""
    log: str = ""
    """The logarithmic axes: x, y, xy."""
    limits: tuple[float | None, float | None] = (None, None)
    """Ends of the vertical axis; None: those of the values."""
    rows: Sequence[str] = ()
    """Labels of the bars."""
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Part -> its length in each row; the parts of a row follow each other."""

    def draw(self, axes: Axes) -> None:
        """Draw the panel."""
        for (label, line), colour in zip(self.lines.items(), cycle(_COLOURS), strict=False):
            marker = "o" if len(line) <= 40 else ""
            values = [math.nan if value is None else value for _, value in line]
            axes.plot(
                [x for x, _ in line],
                values,
                color=colour,
                linewidth=1.6,
                label=label,
                marker=marker,
                markersize=3.5,
            )
        for (label, position), colour in zip(self.marks.items(), (ORANGE, INK), strict=False):
            if position is not None:
                axes.axvline(position, color=colour, linewidth=1.2, linestyle="--", label=label)
        ends = [0.0] * len(self.rows)
        for (label, widths), colour in zip(self.bars.items(), cycle(_COLOURS), strict=False):
            axes.barh(range(len(ends)), widths, left=ends, height=0.55, color=colour, label=label)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        if self.rows:
            axes.set_yticks(range(len(self.rows)), self.rows)
            axes.invert_yaxis()
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if name in self.log:
                getattr(axes, f"set_{name}scale")("log")
                axis.set_minor_formatter(NullFormatter())
            elif name == "x":
                axis.set_major_locator(MaxNLocator(nbins=6))
            if name == "x" or not self.rows:
                show = _whole if name == "x" and self.x == "step" else figure
                axis.set_major_formatter(FuncFormatter(lambda value, _, show=show: show(value)))
        axes.set(xlabel=self.x, ylabel=self.y)
        axes.set_ylim(*self.limits) if self.limits != (None, None) else None
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(fontsize=8.5, labelcolor=GREY)


def _whole(step: float) -> str:
    return compact(step).replace(" ", "")


def draw(path: Path, *, title: str, panels: Sequence[Panel]) -> None:
    """Draw panels beside each other into a PNG, which is renamed into place: no reader sees an incomplete one."""
    most_rows = max(len(panel.rows) for panel in panels)
    size = (max(7.2, 4.8 * len(panels)), max(4.0, 1.6 + 0.5 * most_rows))
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of characters that the font lacks
        chart = Figure(figsize=size, dpi=140, layout="constrained")
        chart.suptitle(title if len(title) <= 100 else f"{title[:99]}…", x=0.012, ha="left", fontweight="bold")
        for axes, panel in zip(chart.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel.draw(axes)
        save(chart, path)


def save(chart: Figure, path: Path) -> None:
    """Write a chart beside its place and rename it."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    chart.savefig(partial, format="png")
    partial.replace(path)


def draw_loss(path: Path, *, title: str, losses: Mapping[str, Line]) -> None:
    """Draw the losses of a run, by name; the axis is logarithmic if they fall by more than a factor of ten."""
    values = [value for line in losses.values() for _, value in line if value is not None]
    falls = bool(values) and 0 < 10 * min(values) < max(values)
    draw(path, title=title, panels=[Panel(x="step", y="loss", lines=losses, log="y" if falls else "")])


def draw_rates(path: Path, *, title: str, rates: Mapping[str, Line]) -> None:
    """Draw the learning rate of each optimizer, by name."""
    draw(path, title=title, panels=[Panel(x="step", y="learning rate", lines=rates, limits=(0, None))])


def draw_bench(path: Path, *, title: str, choices: Sequence[Mapping[str, Any]]) -> None:
    """Draw the speed of the choices that were measured, and the parts of a step."""
    choices = [choice for choice in choices if choice["samples_per_s"] is not None]
    rows = [choice["label"] if len(choice["label"]) <= 44 else f"{choice['label'][:43]}…" for choice in choices]
    speeds = {"samples/s": [choice["samples_per_s"]["median"] for choice in choices]}
    parts = {name: [1e3 * choice["parts_s"][name]["median"] for choice in choices] for name in choices[0]["parts_s"]}
    panels = [Panel(x="samples/s", rows=rows, bars=speeds), Panel(x="milliseconds a step", rows=rows, bars=parts)]
    draw(path, title=title, panels=panels)


def draw_range(
    path: Path,
    *,
    title: str,
    points: Sequence[Mapping[str, float]],
    steepest: Mapping[str, Any] | None,
    tenth_of_minimum: Mapping[str, Any] | None,
) -> None:
    """Draw the loss over the learning rate, with a line at each suggested rate.

    The axis of the loss ends at twice the fall of the loss above its minimum, so a diverging loss leaves the plot.
    """
    rates = {"steepest": steepest, "a tenth of the minimum's rate": tenth_of_minimum}
    marks = {f"{name}: {figure(rate['lr'])}": rate["lr"] for name, rate in rates.items() if rate is not None}
    lines = {name: [(point["lr"], point[name]) for point in points] for name in ("smoothed", "loss")}
    limits: tuple[float | None, float | None] = (None, None)
    if finite := [value for _, value in lines["smoothed"] if math.isfinite(value)]:
        first, least = finite[0], min(finite)
        height = (first - least) or abs(first) or 1.0
        limits = least - _ROOM * height, first + (1 + _ROOM) * height
    draw(path, title=title, panels=[
        Panel(x="learning rate", y="loss", lines=lines, marks=marks, log="x", limits=limits)
    ])  # fmt: skip


def draw_scale(
    path: Path,
    *,
    title: str,
    predictions: Sequence[Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
    knee: Mapping[str, float] | None,
) -> None:
    """Draw speed-up, efficiency and cost over the replicas, with a line at the knee."""

    def over(value: Any) -> list[tuple[float, float]]:
        return [(point["replicas"], value(point)) for point in predictions]

    alone_s = {point["replicas"]: point["speedup"]["middle"] * point["step_s"] for point in predictions}
    speeds = {
        "predicted": over(lambda point: point["speedup"]["middle"]),
        "measured": [(check["replicas"], alone_s[check["replicas"]] / check["measured_s"]) for check in checks],
        "lowest": over(lambda point: point["speedup"]["low"]),
        "highest": over(lambda point: point["speedup"]["high"]),
        "each as much as the first": over(lambda point: point["replicas"]),
    }
    marks = {"knee": None if knee is None else knee["middle"]}
    panels = [Panel(x="replicas", y="speed-up", lines=speeds, marks=marks, log="xy")]
    for key, label in (("efficiency", "efficiency"), ("cost_per_million", "cost of a million samples")):
        if None not in (values := [point[key] for point in predictions]):
            line = {label: over(lambda point, key=key: point[key])}
            limits = (0.0, 1.05 * max(values))
            panels.append(Panel(x="replicas", y=label, lines=line, marks=marks, log="x", limits=limits))
    draw(path, title=title, panels=panels)
