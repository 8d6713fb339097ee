"""Parse JSON from an untrusted source: depth and integers are limited, and the structure is checked.

The text comes from a file (`trainkit.reading`), or from a connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

_MAX_DEPTH: Final = 64
"""Largest depth of nested maps and lists; trainkit writes fewer than 20."""
_MAX_INTEGER: Final = 1 << 64
"""Limit of the absolute value of integers: seeds are unsigned numbers of 64 bits."""

Kind = type | tuple[type, ...]
"""The type of a value; `object` accepts any."""

_NAMES: Final[Mapping[type, str]] = {
    dict: "a map",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def parse_json(text: str | bytes | bytearray, *, depth: int = _MAX_DEPTH) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: the text; bytes must be UTF-8.
        depth: largest depth of nested maps and lists.

    Raises:
        ValueError: the text is not UTF-8, empty, not JSON, nested deeper, or contains a duplicate key, an integer
            beyond 64 bits or half of a surrogate pair.

    Example:
        >>> parse_json('{"step": 3}')
        {'step': 3}
        >>> parse_json('{"step": 3, "step": 4}')
        Traceback (most recent call last):
        ValueError: it holds the key 'step' twice
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        content = _DECODER.decode(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"its JSON is nested deeper than {depth}") from None
    _refuse_deep(content, depth)
    return content


def _integer(text: str) -> int:
    number = int(text) if len(text) <= 21 else _MAX_INTEGER  # parsing takes quadratic time in the length
    if not -_MAX_INTEGER < number < _MAX_INTEGER:
        raise ValueError("it holds an integer beyond 64 bits")
    return number


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it holds the key {_short(twice)} twice")
    return found


_DECODER: Final = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_unique)


def _refuse_deep(content: Any, depth: int) -> None:
    """Refuse values nested too deep, and text that no file can hold."""
    level = [content]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _refuse_surrogates(value)
        if not inner:
            return
        level = inner
    raise ValueError(f"its JSON is nested deeper than {depth}")


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is not text") from None


def expect_map(
    content: Any, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """Check the keys of a map and the types of their values; accept further keys.

    An integer is also a number; true and false are neither.

    Raises:
        ValueError: the content is not a map, a key is missing, or a value has another type.

    Example:
        >>> expect_map({"step": "3"}, {"step": int})
        Traceback (most recent call last):
        ValueError: its key step is a text, and an integer was expected
    """
    if not isinstance(content, dict):
        names = f" with the keys {', '.join(kinds)}" if kinds else ""
        raise ValueError(f"it is {_kind_of(content)}, and a map{names} was expected")  # noqa: TRY004 - of a text
    for key, kind in {**kinds, **(optional or {})}.items():
        if key not in content:
            if key in kinds:
                raise ValueError(f"its key {key} is missing")
        elif not _is(content[key], kind):
            wanted = " or ".join(dict.fromkeys(_NAMES[one] for one in (kind if isinstance(kind, tuple) else (kind,))))
            raise ValueError(f"its key {key} is {_kind_of(content[key])}, and {wanted} was expected")
    return content


def expect_maps(content: Any, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None) -> list[Any]:
    """Check that a list contains maps with known keys, each as in `expect_map`.

    Raises:
        ValueError: the content is not a list, or an item is not such a map.
    """
    if not isinstance(content, list):
        raise ValueError(f"it is {_kind_of(content)}, and a list was expected")  # noqa: TRY004 - of a text
    for number, item in enumerate(content, start=1):
        try:
            expect_map(item, kinds, optional=optional)
        except ValueError as error:
            raise ValueError(f"of item {number}: {error}") from None
    return content


def whole_numbers(content: Any) -> list[int]:
    """Check that a list contains integers of at least 0.

    Raises:
        ValueError: the content is not a list, or contains something else.
    """
    if not isinstance(content, list | tuple):
        raise ValueError(f"it is {_kind_of(content)}, and a list of whole numbers was expected")  # noqa: TRY004 - of a text
    if any(type(number) is not int or number < 0 for number in content):
        raise ValueError("it holds something else than whole numbers from 0 on")
    return list(content)


def _is(value: Any, kind: Kind) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds or object in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return isinstance(value, kinds)


def _kind_of(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return _NAMES.get(type(value), type(value).__name__)


def _short(text: str, most: int = 40) -> str:
    return ascii(text if len(text) <= most else f"{text[:most]}...")
