"""Parse JSON and YAML from an untrusted source: size, depth, integers and alias expansion are limited, tags refused.

The text comes from a file (`trainkit.files`), or from a connection. The limits of YAML are checked on the parser's
events, one after the other, so that nothing is built from a text that exceeds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

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
        raise ValueError(f"it is not JSON: {error}") from None
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
        raise ValueError("it holds other values than whole numbers from 0 on")
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


MAX_BYTES: Final = 1 << 20
"""Largest number of bytes of a YAML file of a config."""
MAX_DEPTH: Final = 50
"""Largest depth of nested mappings and lists."""
MAX_VALUES: Final = 20_000
"""Largest number of keys, values and items of one text, with every alias expanded."""

_PREFIX: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset(f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableYAMLError(yaml.MarkedYAMLError):
    """A text that trainkit refuses to read as YAML; `problem` is the reason, and `problem_mark` the place."""


class SafeLoader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader; a scalar that cannot be constructed is an error with its place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            reason = "an integer has too many digits" if "digits" in str(error) else str(error)
            raise UnreadableYAMLError(
                problem=f"holds a scalar that cannot be read: {reason}", problem_mark=node.start_mark
            ) from None


def parse_yaml(text: str) -> Any:
    """Parse YAML from an untrusted source.

    Raises:
        ValueError: the text is not YAML, or exceeds a limit; the message begins with "it".

    Example:
        >>> parse_yaml("step: 3")
        {'step': 3}
        >>> parse_yaml("a: !!set {b}")
        Traceback (most recent call last):
        ValueError: line 1 of it holds the tag !!set; a config holds plain values only
    """
    try:
        check_bounds(text)
        return yaml.load(text, Loader=SafeLoader)  # noqa: S506 - a safe loader
    except UnreadableYAMLError as error:
        line = f"line {error.problem_mark.line + 1} of it" if error.problem_mark else "it"
        raise ValueError(f"{line} {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from None


def check_bounds(text: str) -> None:
    """Refuse YAML that exceeds a limit, before anything is built from it.

    Raises:
        UnreadableYAMLError: the text is nested too deep, has too many values, contains an alias inside its own
            anchor, or a tag of another type than plain values.
        yaml.YAMLError: the text is not YAML.
    """
    open_: list[_Extent] = []
    anchors: dict[str, _Extent] = {}
    total = 0
    for event in _events(text):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            extent = _aliased(event, anchors, open_)
        elif isinstance(event, yaml.CollectionEndEvent):
            _close(open_)
            continue
        elif isinstance(event, yaml.NodeEvent):
            _refuse_tag(event)
            extent = _Extent.of(event)
        else:
            continue
        total += extent.size
        if len(open_) + extent.depth > MAX_DEPTH:
            raise _broken(event, f"nests mappings and lists more than {MAX_DEPTH} deep")
        if total > MAX_VALUES:
            raise _broken(event, f"holds more than {MAX_VALUES:,} values, aliases expanded")
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            anchors[anchor] = extent
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(extent)
        elif open_:
            open_[-1].add(extent)


@dataclass
class _Extent:
    """The number of values below a node, and their depth."""

    depth: int
    """Depth of nested mappings and lists, including this one."""
    size: int
    """Number of values, including this one; each 64 characters of a text count as one more."""

    @classmethod
    def of(cls, event: Any) -> _Extent:
        """Return the extent of a scalar, or the initial extent of a mapping or list."""
        if isinstance(event, yaml.ScalarEvent):
            return cls(depth=0, size=1 + len(event.value) // 64)
        return cls(depth=1, size=1)

    def add(self, inner: _Extent) -> None:
        """Add a node inside of this one."""
        self.size += inner.size
        self.depth = max(self.depth, 1 + inner.depth)


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=_Base)
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n")
        mark = yaml.Mark("", error.position, line, 0, None, 0)
        what = f"holds the character {ascii(chr(error.character))[1:-1]}, which YAML does not allow"
        raise UnreadableYAMLError(problem=what, problem_mark=mark) from None


def _close(open_: list[_Extent]) -> None:
    closed = open_.pop()
    if open_:
        open_[-1].add(closed)


def _aliased(event: Any, anchors: dict[str, _Extent], open_: list[_Extent]) -> _Extent:
    extent = anchors.get(event.anchor)
    if extent is None:
        raise _broken(event, f"holds the alias *{event.anchor}, and no anchor &{event.anchor} before it")
    if any(extent is one for one in open_):
        raise _broken(event, f"holds the alias *{event.anchor} inside its own anchor")
    return extent


def _refuse_tag(event: Any) -> None:
    tag = event.tag
    if tag in (None, "!") or tag in _TAGS:
        return
    shown = f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag
    raise _broken(event, f"holds the tag {shown}; a config holds plain values only")


def _broken(event: Any, problem: str) -> UnreadableYAMLError:
    return UnreadableYAMLError(problem=problem, problem_mark=event.start_mark)
