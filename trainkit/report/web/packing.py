"""Write curves for a page: numbers with 7 significant digits, packed if the page would be too large.

A packed column is the shortest of three forms, which `charts.js` reads:

    [0.5, 0.25, null]          a list
    {"r": [0.5, 3, 0.25, 1]}   values, each with the number of its repetitions: a constant rate, equal distances
    "AAAAPwAAgD4"              32-bit floats, little endian, in base64: 5.3 bytes per value; a list takes about 10
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

Column = list[float | int | None] | dict[str, list[float | int | None]] | str
"""The numbers of a page in one of the three forms."""
_LARGEST: Final = 3.4e38
_SMALLEST: Final = 1.2e-38
"""Range in which a 32-bit float has 7 significant digits."""


def compact_curve(points: Sequence[tuple[int, float | None]], seen: int, *, is_packed: bool = False) -> dict[str, Any]:
    """Return a curve for a page: its steps as differences, its values with 7 significant digits.

    Args:
        points: step and value of each point, in order.
        seen: number of points before any were left out.
        is_packed: whether to take the shortest form of each column.

    Example:
        >>> compact_curve([(10, 0.5), (20, 0.25), (30, None)], 3)
        {'seen': 3, 'every': [10, 10, 3], 'y': [0.5, 0.25, None]}
        >>> compact_curve([(step, 0.25) for step in (10, 20, 30, 45)], 4, is_packed=True)
        {'seen': 4, 'dx': [10, 10, 10, 15], 'y': {'r': [0.25, 4]}}
    """
    steps = [step for step, _ in points]
    between = [later - earlier for earlier, later in itertools.pairwise(steps)]
    values = column([value for _, value in points], is_packed=is_packed)
    if steps and len(set(between)) <= 1:
        return {"seen": seen, "every": [steps[0], between[0] if between else 1, len(steps)], "y": values}
    strides: list[float | int | None] = [*steps[:1], *between]
    return {"seen": seen, "dx": _shortest([strides, _repeated(strides)]) if is_packed else strides, "y": values}


def column(values: Sequence[float | None], *, digits: int = 7, is_packed: bool = False) -> Column:
    """Return numbers for a page, with at most 7 significant digits; None for a number that is not finite."""
    plain = [None if value is None else _rounded(value, digits) for value in values]
    return _shortest([plain, _repeated(plain), *_floats(plain)]) if is_packed else plain


def _rounded(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and math.fabs(rounded) < 1e15 else rounded


def _repeated(values: Sequence[float | int | None]) -> dict[str, list[float | int | None]]:
    return {"r": [part for value, same in itertools.groupby(values) for part in (value, sum(1 for _ in same))]}


def _floats(values: Sequence[float | int | None]) -> Iterator[str]:
    """Yield the numbers as 32-bit floats in base64, with NaN for None; nothing if they exceed the range."""
    if all(value is None or value == 0 or _SMALLEST < math.fabs(value) < _LARGEST for value in values):
        content = struct.pack(f"<{len(values)}f", *(math.nan if value is None else value for value in values))
        yield base64.b64encode(content).decode()


def _shortest(forms: Sequence[Column]) -> Column:
    return min(forms, key=lambda form: len(json.dumps(form, separators=(",", ":"))))
