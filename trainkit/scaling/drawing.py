"""Draw speed-up, efficiency and cost over replicas. Imports matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from trainkit.report.curves import BLUE, GREY, INK, ORANGE, STYLE
from trainkit.report.numbers import figure
from trainkit.scaling.result import Scaling


def draw_scaling(path: Path, found: Scaling) -> None:
    """Write the plot as PNG."""
    with rc_context(STYLE):
        panels = 3 if found.cost_per_million else 2
        chart = Figure(figsize=(4.4 * panels, 3.8), layout="constrained", dpi=150)
        axes = chart.subplots(1, panels)
        _draw_speedup(axes[0], found)
        shares = [one.efficiency for one in found.predictions]
        _draw_line(axes[1], found, shares, "efficiency")
        axes[1].set_ylim(0, 1.05 * max(shares))
        if found.cost_per_million:
            costs = [found.cost_per_million[one.replicas] for one in found.predictions]
            _draw_line(axes[2], found, costs, "cost of a million samples")
            axes[2].set_ylim(bottom=0)
        chart.suptitle(found.title, fontsize=11, color=INK, x=0.01, ha="left")
        chart.savefig(path)


def _draw_speedup(axes: Axes, found: Scaling) -> None:
    counts = [one.replicas for one in found.predictions]
    low, high = [one.speedup.low for one in found.predictions], [one.speedup.high for one in found.predictions]
    axes.fill_between(counts, low, high, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(counts, counts, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="each as much as the first")
    _draw_line(axes, found, [one.speedup.middle for one in found.predictions], "speed-up")
    one_s = found.shares[0][1].middle
    measured = [(check.replicas, one_s / check.measured_s) for check in found.checks]
    if measured and not found.grows:
        axes.plot(*zip(*measured, strict=True), "o", color=ORANGE, markersize=6, label="measured", zorder=4)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8.5)


def _draw_line(axes: Axes, found: Scaling, values: list[float], label: str) -> None:
    counts = [one.replicas for one in found.predictions]
    axes.plot(counts, values, color=BLUE, linewidth=2, marker=".", markersize=5)
    if found.has_verdict:
        axes.axvline(found.knee.middle, color=ORANGE, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.annotate(
            "knee", (found.knee.middle, 1), (4, -12), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8.5, color=ORANGE,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    axes.set_xlabel("replicas")
    axes.set_title(label, fontsize=10, loc="left", color=INK)
