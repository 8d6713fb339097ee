"""Leave parts out of the page of a run that would be too large, in a fixed order; the page names them.

    1. pictures: that of the worst samples, then those of the highest losses, the last one first
    2. texts after 120 characters, and rows of tables after the first 60
    3. confusion matrices and layers
    4. texts after 20 characters, and rows of tables after the first 6

Verdict, best metric, commands and trust strip stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

Data = dict[str, Any]
"""Content of the page of a run without its curves."""
Cut = Callable[[Data], str | None]
"""Leaves a part out of the data, and returns its name; None: the part does not exist."""
_TABLES: Final = {
    "settings": "config",
    "environment": "environment",
    "result": "result.json",
    "notes": "notes",
    "ranks": "ranks",
    "marks": "marks",
}
"""The parts of the data that are lists of rows, and their names; the worst samples are also a table."""
_CUT: Final = re.compile(r"(.*)\.\.\. \(([\d,]+) characters\)", re.DOTALL)
"""A text that `printable` has cut."""


def versions_of(data: Data, *, limit: int) -> list[Callable[[], Data]]:
    """Return functions to call in order: the first returns the data, each next one leaves out more.

    Args:
        data: what the page shows; it is changed.
        limit: largest number of bytes of the page, for the line that names the left out parts.
    """
    left: dict[str, str] = {}

    def after(cut: Cut) -> Callable[[], Data]:
        def make() -> Data:
            words = cut(data)
            if words:
                left[words.partition(" after ")[0]] = words  # a later cut of texts or rows replaces an earlier one
                named = "; ".join(left.values())
                data["left_out"] = f"Left out, since this page has at most {limit // 1000} KB: {named}."
            return data

        return make

    return [lambda: data, *(after(cut) for cut in _cuts(data))]


def _cuts(data: Data) -> Iterator[Cut]:
    if data["worst"] is not None:
        yield _picture_of(data["worst"], "the picture of the worst samples")
    for one in reversed(data["figures"]["samples"]):
        yield _picture_of(one, one["file"])
    yield _texts_after(120)
    yield _rows_after(60)
    yield _matrices_and_layers
    yield _texts_after(20)
    yield _rows_after(6)


def _picture_of(one: Data, words: str) -> Cut:
    def cut(_: Data) -> str | None:
        had, one["picture"] = one["picture"], None
        return words if had else None

    return cut


def _matrices_and_layers(data: Data) -> str | None:
    figures = data["figures"]
    had = [words for words, part in (("confusion matrices", "confusion"), ("layers", "layers")) if figures[part]]
    figures.update(confusion=[], layers=None)
    return " and ".join(had) or None


def _texts_after(most: int) -> Cut:
    def cut(data: Data) -> str:
        data["longest"] = most
        data.update({name: shortened(data[name], most) for name in (*_TABLES, "worst")})
        return f"texts after {most} characters"

    return cut


def shortened(value: Any, most: int) -> Any:
    """Return a JSON value with every text cut to at most `most` characters, followed by its original length.

    Example:
        >>> shortened({"a": ["long text", 3]}, 4)
        {'a': ['long... (9 characters)', 3]}
        >>> shortened("long text... (9,000 characters)", 4)
        'long... (9,000 characters)'
    """
    if isinstance(value, str):
        before = _CUT.fullmatch(value)
        text, length = (value, f"{len(value):,}") if before is None else before.groups()
        return value if len(text) <= most else f"{text[:most]}... ({length} characters)"
    if isinstance(value, list):
        return [shortened(one, most) for one in value]
    return {key: shortened(one, most) for key, one in value.items()} if isinstance(value, dict) else value


def _rows_after(most: int) -> Cut:
    def cut(data: Data) -> str | None:
        tables = {words: data[name] for name, words in _TABLES.items() if data[name] and name != "marks"}
        if data["worst"] is not None:
            tables["worst samples"] = data["worst"]["rows"]
        marks: dict[str, list[Data]] = {}
        for one in data["marks"]:
            marks.setdefault(f"{one['kind']} marks", []).append(one)
        tables |= marks
        longer = [words for words, rows in tables.items() if len(rows) > most]
        for rows in tables.values():
            del rows[most:]
        data["marks"] = [one for kind in marks.values() for one in kind]
        return f"rows after the first {most} of {', '.join(longer)}" if longer else None

    return cut
