"""Plots of a classification: its confusion matrix and worst samples. Imports matplotlib: for the drawing process."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainkit.report.curves import GREY, INK, STYLE, save
from trainkit.report.numbers import compact

_MOST_NUMBERS: Final = 26
"""Up to this many classes, each cell shows its number."""
_MOST_NAMES: Final = 60
"""Up to this many classes, each has a label."""
_COLUMNS: Final = 8
_LONGEST: Final = 14


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
            names = [_short(name) for name in classes]
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
    columns = min(_COLUMNS, len(samples))
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


def _short(name: str, most: int = _LONGEST) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."
