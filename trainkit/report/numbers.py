"""Format numbers for people: few digits, thousands separators, units; choose some of many items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: float) -> str:
    """Format a measured value with four significant digits.

    Example:
        >>> [figure(x) for x in (0.123456, 12345.6, 0.001, 2.5e-7, float("nan"), 3, 99.996)]
        ['0.1235', '12,346', '0.001', '2.5e-7', 'nan', '3', '100']
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def fixed(value: float) -> str:
    """Format a measured value with four significant digits and trailing zeros, so that a changing number keeps its
    width.

    Example:
        >>> [fixed(x) for x in (0.5, 2.0, 0.1234567, 31.5, 1.2e-6)]
        ['0.5000', '2.000', '0.1235', '31.50', '1.200e-6']
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{min(4, max(0, 3 - math.floor(math.log10(abs(value)))))}f}"


def count(value: int) -> str:
    """Format a whole number with thousands separators.

    Example:
        >>> count(1797)
        '1,797'
    """
    return f"{value:,d}"


def compact(value: float) -> str:
    """Format a large quantity with three digits and a suffix.

    Example:
        >>> [compact(x) for x in (950, 1234, 9610, 412_345, 999_999, 25_557_032, 0.25)]
        ['950', '1.23 k', '9.61 k', '412 k', '1.00 M', '25.6 M', '0.25']
    """
    for size, suffix in _SUFFIXES:
        # Rounding decides the suffix: 999,999 is 1.00 M, never 1000 k.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2}f} {suffix}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Format a fraction as a percentage.

    Example:
        >>> [share(x) for x in (0.0312, 0.9, 0.0004)]
        ['3 %', '90 %', '0 %']
    """
    return f"{value:.0%}".replace("%", " %")


def duration(seconds: float) -> str:
    """Format a time span.

    Example:
        >>> [duration(x) for x in (0.314, 8.26, 59.96, 75, 3723, 93_784)]
        ['0.31 s', '8.3 s', '1:00', '1:15', '1:02:03', '1 d 2:03']
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock(seconds: float) -> str:
    """Format a time that counts down, always in the same form.

    Example:
        >>> [clock(x) for x in (0.4, 8.2, 59.6, 75, 3723)]
        ['0:00', '0:08', '1:00', '1:15', '1:02:03']
    """
    if not math.isfinite(seconds):
        return "-:--"
    return f"0:{round(seconds):02d}" if seconds < 59.5 else duration(max(60, seconds))


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at equal distances, the first and the last among them.

    Example:
        >>> evenly(range(10), 4), evenly(range(3), 4)
        ([0, 3, 6, 9], [0, 1, 2])
    """
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / max(most - 1, 1))] for index in range(most)]
