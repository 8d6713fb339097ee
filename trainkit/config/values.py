"""Words, numbers and paths in the texts that a person writes."""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

MOST_PROCESSES: Final = 1_024
"""Largest number of processes, or devices, of one host in a key."""


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the word most similar to a misspelt one, or None.

    Example:
        >>> closest("epohs", ["epochs", "steps"])
        'epochs'
    """
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else None


def nearest(word: str, words: Collection[str], *, shown: Collection[str] | None = None) -> str:
    """Return a sentence with the word most similar to a misspelt one; else with all words, or those `shown`.

    Example:
        >>> nearest("epohs", ["epochs", "steps"]), nearest("x", ["epochs", "steps"])
        ('Did you mean epochs?', 'There are: epochs, steps.')
    """
    near = closest(word, words)
    return f"Did you mean {near}?" if near else f"There are: {', '.join(words if shown is None else shown)}."


def plain(hint: Any) -> Any:
    """Return the annotation without the Annotated, Final, ClassVar and Required around it."""
    while (origin := typing.get_origin(hint)) is typing.Annotated or origin in (typing.Final, typing.ClassVar):
        hint = typing.get_args(hint)[0]
    return hint


def either(words: Iterable[str]) -> str:
    """Return words as a text, `a, b or c`."""
    choices = list(dict.fromkeys(words))
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def whole_number(text: str, *, low: int, high: int) -> int | None:
    """Return the number that a text writes in plain digits; None for any other text, or a number outside of the limits.

    Example:
        >>> whole_number("12", low=1, high=100), whole_number("1e3", low=1, high=10_000)
        (12, None)
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return None
    number = int(text)
    return number if low <= number <= high else None


def seconds_of(duration: str) -> float:
    """Return the seconds of a time with its unit.

    Example:
        >>> seconds_of("90s"), seconds_of("5min"), seconds_of("1.5h")
        (90.0, 300.0, 5400.0)
    """
    number = duration.rstrip("sminh")
    return float(number) * {"s": 1, "min": 60, "h": 3600}[duration[len(number) :]]


def expanded(path: str) -> str:
    """Return a path with the home folder in place of `~`; a name that only begins with `~` becomes absolute.

    Example:
        >>> expanded("~no_such_user").endswith("/~no_such_user"), expanded("runs/~1")
        (True, 'runs/~1')
    """
    text = os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for a user that does not exist
    return str(Path(text).absolute()) if text.startswith("~") else text


def path_rule(path: str) -> str | None:
    """Return why a path cannot be used: no file system of Linux accepts it, or no file of a run can name it; None if it
    can.

    Example:
        >>> path_rule("runs/" + "x" * 300), path_rule("runs/1")
        ('has a name of 300 bytes; a file system takes 255 at most.', None)
    """
    sizes = [len(part.encode(errors="surrogateescape")) for part in path.split("/")]
    if "\0" in path:
        return "holds a null character, which no path may hold."
    if any("\ud800" <= char <= "\udfff" for char in path):  # Python's form of such bytes
        return "has bytes in its whole path that are not UTF-8, which the JSON files of a run cannot hold. Rename them."
    if max(sizes) > 255:
        return f"has a name of {max(sizes):,} bytes; a file system takes 255 at most."
    total = sum(sizes) + len(sizes) - 1
    return f"has {total:,} bytes; a path may have 4,095." if total > 4095 else None


def leaves(values: Mapping[Any, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every key that holds no further keys, in order; an empty mapping is a leaf.

    Example:
        >>> leaves({"a": {"b": 1}, "c": {}})
        [(('a', 'b'), 1), (('c',), {})]
    """
    items = []
    for name, value in values.items():
        inner = (*path, str(name))
        items += leaves(value, inner) if isinstance(value, Mapping) and value else [(inner, value)]
    return items
