"""The learning rate over the steps of a training: one line of a terminal, and its corners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainkit.numerics.schedules import LearningRate, lr_points

_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = "_.-=+*#@"
"""The same heights for terminals that show only ASCII."""
_WIDTH: Final = 60


def bars(values: Sequence[float], *, encoding: str | None) -> str:
    """Return values as a line of bars, from 0 to the largest.

    Example:
        >>> bars([0.0, 0.5, 1.0, 0.25], encoding="utf-8"), bars([0.0, 0.5, 1.0, 0.25], encoding="ascii")
        ('▁▄█▂', '_=@.')
    """
    marks = _BARS if (encoding or "").lower().replace("-", "") == "utf8" else _PLAIN
    top = max(values, default=0.0)
    return "".join(marks[int(value / top * (len(marks) - 1)) if top > 0 else 0] for value in values)


def curve_line(rate: LearningRate, *, encoding: str | None) -> str:
    """Return the learning rate of all steps as a line of bars."""
    return bars([value for _, value in lr_points(rate, rate.num_steps, most=_WIDTH)], encoding=encoding)


def corners(rate: LearningRate) -> str:
    """Return the learning rate at its corners and quarters, as text."""
    rest = rate.num_steps - rate.warmup_steps
    quarters = [rate.warmup_steps + rest * quarter // 4 for quarter in range(4)]
    steps = sorted({0, max(rate.warmup_steps - 1, 0), *quarters, rate.num_steps - 1})
    return ", ".join(f"{rate(step):.3g} at {step:,}" for step in steps if 0 <= step < rate.num_steps)
