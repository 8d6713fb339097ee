"""Put a page together: one HTML file with style, scripts and data inside, which loads nothing."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

MARK: Final = b"<!doctype html><!-- trainkit report -->"
"""The first bytes of every page: a file that lacks them was not written by trainkit."""
RUN_PAGE_BYTES: Final = 300_000
"""Largest size of the page of a run."""
COMPARISON_BYTES: Final = 1_000_000
"""Largest size of a comparison."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser is told to load nothing, whatever stands in the page."""
_LONGEST_TITLE: Final = 200


def make_page(title: str, data: Mapping[str, Any], *, scripts: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: the title of the window.
        data: what the scripts show; any text in it is shown as text.
        scripts: the names of the scripts, in the order of their execution; `uPlot.iife.min.js` comes before them.
    """
    shown = html.escape(printable(title, _LONGEST_TITLE))
    code = "\n".join(_static(name) for name in ("uPlot.iife.min.js", *scripts))
    return (
        f'{MARK.decode()}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{shown}</title><style>{_static('uPlot.min.css')}\n{_static('page.css')}</style></head>\n"
        f'<body><main id="page"><noscript>This page shows its figures by JavaScript.</noscript></main>\n'
        f'<script type="application/json" id="data">{to_json(data)}</script>\n'
        f"<script>{code}</script></body></html>\n"
    )


def fit(make: Callable[[int], str], *, limit: int, points: Sequence[int], least: Callable[[int], int]) -> str:
    """Return the page with the largest number of points a curve that fits into a number of bytes; else the smallest.

    Args:
        make: returns the page with at most so many points a curve.
        limit: largest number of bytes.
        points: numbers of points to try, largest first.
        least: returns the bytes that the points take at least; a page that they exceed is not made.
    """
    page = ""
    for most in points:
        if least(most) > limit and most != points[-1]:
            continue
        page = make(most)
        if len(page.encode()) <= limit:
            break
    return page


@lru_cache(maxsize=16)
def _static(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def to_json(data: Any) -> str:
    r"""Return JSON that no HTML parser takes for markup: `<` is escaped, and so are the line separators of JavaScript.

    Example:
        >>> to_json({"name": "</script>"})
        '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def printable(text: str, most: int = 400) -> str:
    r"""Return text without control characters, cut after some characters with their number.

    Example:
        >>> printable("a" * 9, 4), printable("a\x1b[31m")
        ('aaaa... (9 characters)', 'a?[31m')
    """
    kept = text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
    return "".join(one if one.isprintable() or one == "\n" or _is_bidi(one) else "?" for one in kept)


def _is_bidi(character: str) -> bool:
    """Return whether a character sets the direction of text, which the page isolates."""
    return "\u200e" <= character <= "\u200f" or "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"


def compact_curve(points: Sequence[tuple[int, float | None]], seen: int) -> dict[str, Any]:
    """Return a curve for a page: its steps as differences, its values with 7 significant digits.

    Args:
        points: step and value of each point, in order.
        seen: number of points before any were left out.

    Example:
        >>> compact_curve([(10, 0.5), (20, 0.25), (30, None)], 3)
        {'seen': 3, 'every': [10, 10, 3], 'y': [0.5, 0.25, None]}
    """
    steps = [step for step, _ in points]
    between = [later - earlier for earlier, later in itertools.pairwise(steps)]
    values = [None if value is None else _seven_digits(value) for _, value in points]
    if steps and len(set(between)) <= 1:
        place: dict[str, Any] = {"every": [steps[0], between[0] if between else 1, len(steps)]}
    else:
        place = {"dx": [*steps[:1], *between]}
    return {"seen": seen, **place, "y": values}


def _seven_digits(value: float) -> float | int:
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and math.fabs(rounded) < 1e15 else rounded
