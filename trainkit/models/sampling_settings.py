"""Check the settings of a generation, from a flag or from Python, without importing torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, Final

from trainkit.config.door import advice

MAX_TOKENS: Final = 200
"""Tokens to add, if no number is given."""
RULES: Final[Mapping[str, tuple[type, str, Callable[[Any], bool]]]] = {
    "max_tokens": (Integral, "a whole number, 1 or more", lambda number: number >= 1),
    "seed": (Integral, "a whole number, 0 or more", lambda number: 0 <= number < 1 << 63),
    "top_k": (Integral, "a whole number, 1 or more", lambda number: number >= 1),
    "top_p": (Real, "a number above 0, at most 1", lambda number: 0 < number <= 1),
    "temperature": (Real, "a number, 0 or more", lambda number: 0 <= number < math.inf),
}
"""Setting -> its kind, the rule, and whether a number of this kind fits it."""


def broken_settings(given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and rule of each setting that does not fit, or has no effect beside the others.

    Args:
        given: the settings that were given, by name.

    Example:
        >>> list(broken_settings({"temperature": -1.0, "top_k": 3}))
        [('temperature', 'must be a number, 0 or more.')]
    """
    yield from out_of_range(given)
    if temperature_of(given) == 0:
        remedy = advice("--temperature 0.8", "temperature=0.8")
        for name in ("top_k", "top_p", "seed"):
            if name in given:
                yield name, f"has no effect: the most likely token is chosen. Add {remedy}."


def out_of_range(given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and rule of each setting that does not fit by itself."""
    for name, (kind, rule, fits) in RULES.items():
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            yield name, f"must be {rule}."


def temperature_of(given: Mapping[str, Any]) -> Any:
    """Return the temperature: 1 if only the tokens to draw from are given, 0 if nothing is."""
    return given.get("temperature", 1.0 if given.keys() & {"top_k", "top_p"} else 0.0)
