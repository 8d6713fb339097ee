"""Check whether a plain value fits an annotation: numbers, text, enums, Literal, Path, their containers and unions.

Parts of an annotation without a plain form (a tensor, a callable, a type variable) are not checked: the class is
trusted to validate them. A bool is not a number, text is not a number, and numbers are finite.
"""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final, Literal, Union

from trainkit.errors import yaml_text

MOST_PROCESSES: Final = 1_024
"""Largest number of processes, or devices, of one host in a key."""

_SCALARS: Final = (bool, int, float, str, type(None))
_SEQUENCES: Final = (list, tuple, set, frozenset, Sequence, Iterable, typing.Collection)
_NAMES: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
_PLURALS: Final[Mapping[Any, str]] = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the word most similar to a misspelt one, or None.

    Example:
        >>> closest("epohs", ["epochs", "steps"])
        'epochs'
    """
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest(word: str, known: Collection[str], *, shown: Collection[str] | None = None) -> str:
    """Return a sentence with the word most similar to a misspelt one; else with all words, or those `shown`.

    Example:
        >>> nearest("epohs", ["epochs", "steps"]), nearest("x", ["epochs", "steps"])
        ('Did you mean epochs?', 'There are: epochs, steps.')
    """
    near = closest(word, known)
    return f"Did you mean {near}?" if near else f"There are: {', '.join(known if shown is None else shown)}."


def plain(hint: Any) -> Any:
    """Return the annotation without the Annotated, Final, ClassVar and Required around it."""
    while (origin := typing.get_origin(hint)) is typing.Annotated or origin in (typing.Final, typing.ClassVar):
        hint = typing.get_args(hint)[0]
    return hint


def misfit(value: Any, hint: Any) -> str | None:
    """Return what is wrong with a value by its annotation; None if it fits or cannot be checked.

    Args:
        value: a plain value, as YAML gives it.
        hint: an annotation; strings and type variables are not checked.

    Returns:
        The rule as messages show it, `must be a whole number.`

    Example:
        >>> misfit(True, int), misfit(3, float), misfit("sqr", Literal["linear", "sqrt"])
        ('must be a whole number.', None, 'must be linear or sqrt. Did you mean sqrt?')
    """
    hint = plain(hint)
    if _fits(value, hint):
        return None
    if isinstance(value, float) and not math.isfinite(value) and _takes_numbers(hint):
        return "must be finite."
    quoted = "is text: it " if isinstance(value, str) and _reads_as_number(value) else ""
    words = _words(hint)
    near = closest(value, words) if isinstance(value, str) and words else None
    return f"{quoted}must be {expected(hint)}." + (f" Did you mean {near}?" if near else "")


def expected(hint: Any) -> str:
    """Return what an annotation accepts, in words.

    Example:
        >>> expected(int | None), expected(list[float]), expected(Literal["auto", True])
        ('a whole number or null', 'a list of numbers', 'auto or true')
    """
    hint = plain(hint)
    arguments = typing.get_args(hint)
    words: dict[str | None, Callable[[], str]] = {
        "scalar": lambda: _NAMES[hint],
        "literal": lambda: either(yaml_text(choice) for choice in arguments),
        "union": lambda: either(expected(member) for member in arguments if _kind(plain(member))),
        "enum": lambda: either(str(member.value) for member in hint),
        "path": lambda: "a path",
        "list": lambda: _expected_items(arguments),
        "section": lambda: f"a mapping with the keys {', '.join(field.name for field in fields(hint))}",
    }
    return words.get(_kind(hint), lambda: "a mapping")()


def _expected_items(arguments: tuple[Any, ...]) -> str:
    items = [item for item in arguments if item is not Ellipsis]
    if not items or not _kind(plain(items[0])):
        return "a list"
    kind = plain(items[0])
    noun = _PLURALS.get(kind, f"items that are each {expected(kind)}")
    count = f"{len(items)} " if len(items) > 1 or (arguments[-1] is not Ellipsis and len(set(items)) > 1) else ""
    return f"a list of {count}{noun}"


def _fits(value: Any, hint: Any) -> bool:
    hint = plain(hint)
    check = _CHECKS.get(_kind(hint))
    return check is None or check(value, hint)


def _fits_scalar(value: Any, hint: Any) -> bool:
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _fits_union(value: Any, hint: Any) -> bool:
    members = [plain(member) for member in typing.get_args(hint)]
    judged = [member for member in members if _kind(member)]
    if any(_fits(value, member) for member in judged):
        return True
    unjudged = [member for member in members if not _kind(member)]
    if not unjudged:
        return False
    # A scalar is never the tensor of `float | Tensor`: a union that names scalars accepts only these.
    names_scalars = any(member in _NAMES and member is not type(None) for member in judged)
    opaque = any(not isinstance(member, type) or getattr(member, "_is_protocol", False) for member in unjudged)
    return not (isinstance(value, _SCALARS) and names_scalars and not opaque)


def _fits_items(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if not isinstance(value, list | tuple):
        return False
    if not arguments:
        return True
    if origin is tuple and arguments[-1] is not Ellipsis:
        pairs = zip(value, arguments, strict=False)
        return len(value) == len(arguments) and all(_fits(item, hint) for item, hint in pairs)
    return all(_fits(item, arguments[0]) for item in value)


def _fits_mapping(value: Any, hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if not isinstance(value, Mapping):
        return False
    return len(arguments) != 2 or all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())


def _kind(hint: Any) -> str | None:
    """Return the sort of an annotation; None for one without a plain form."""
    origin = typing.get_origin(hint)
    kind = origin or hint
    sorts = (
        ("scalar", hint in _NAMES),
        ("literal", origin is Literal),
        ("union", _is_union(origin) and any(_kind(plain(member)) for member in typing.get_args(hint))),
        ("list", kind in _SEQUENCES),
        ("mapping", kind in (dict, Mapping, typing.MutableMapping)),
        ("section", is_dataclass(kind)),
        ("enum", isinstance(kind, type) and issubclass(kind, Enum)),
        ("path", isinstance(kind, type) and issubclass(kind, PurePath)),
    )
    return next((name for name, holds in sorts if holds), None)


def _fits_literal(value: Any, hint: Any) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))


def _fits_enum(value: Any, hint: Any) -> bool:
    return not isinstance(value, bool) and any(value in (member.value, member.name) for member in hint)


_CHECKS: Final[Mapping[str | None, Callable[[Any, Any], bool]]] = {
    "scalar": _fits_scalar,
    "literal": _fits_literal,
    "union": _fits_union,
    "list": _fits_items,
    "mapping": _fits_mapping,
    "section": lambda value, _: isinstance(value, Mapping),
    "enum": _fits_enum,
    "path": lambda value, _: isinstance(value, str | PurePath),
}


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


def _takes_numbers(hint: Any) -> bool:
    return plain(hint) in (int, float) or any(_takes_numbers(member) for member in typing.get_args(plain(hint)))


def _words(hint: Any) -> list[str]:
    """Return the words an annotation accepts: of a Literal, an enum, or a union with one."""
    hint = plain(hint)
    if typing.get_origin(hint) is Literal:
        return [yaml_text(choice) for choice in typing.get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return (
        [word for member in typing.get_args(hint) for word in _words(member)]
        if _is_union(typing.get_origin(hint))
        else []
    )


def either(words: Iterable[str]) -> str:
    """Return words as a text, `a, b or c`."""
    found = list(dict.fromkeys(words))
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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


def expanded(path: str) -> str:
    """Return a path with the home folder in place of `~`; a name that only begins with `~` becomes absolute.

    Example:
        >>> expanded("~no_such_user").endswith("/~no_such_user"), expanded("runs/~1")
        (True, 'runs/~1')
    """
    found = os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for a user that does not exist
    return str(Path(found).absolute()) if found.startswith("~") else found


def path_rule(path: str) -> str | None:
    """Return why no file system of Linux accepts a path; None if it does.

    Example:
        >>> path_rule("runs/" + "x" * 300), path_rule("runs/1")
        ('has a name of 300 bytes; a file system takes 255 at most.', None)
    """
    sizes = [len(part.encode(errors="surrogateescape")) for part in path.split("/")]
    if "\0" in path:
        return "holds a null character, which no path may hold."
    if max(sizes) > 255:
        return f"has a name of {max(sizes):,} bytes; a file system takes 255 at most."
    return (
        f"has {sum(sizes) + len(sizes) - 1:,} bytes; a path may have 4,095." if sum(sizes) + len(sizes) > 4096 else None
    )
