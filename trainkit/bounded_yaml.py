"""Parse YAML from an untrusted source: size, depth and alias expansion are limited, and only plain values allowed.

The limits are checked on the parser's events, one after the other, so that nothing is built from a text that exceeds
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

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
            raise UnreadableYAMLError(problem=f"holds no value: {reason}", problem_mark=node.start_mark) from None


def parse_yaml(text: str) -> Any:
    """Parse YAML from an untrusted source.

    Raises:
        ValueError: the text is not YAML, or exceeds a limit; the message begins with "it".

    Example:
        >>> parse_yaml("step: 3")
        {'step': 3}
        >>> parse_yaml("a: !!set {b}")
        Traceback (most recent call last):
        ValueError: line 1 of it holds the tag !!set; a config holds plain values alone
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
        UnreadableYAMLError: the text is nested too deep, has too many values, contains an alias inside of its own
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
        """Return the extent of a scalar, or the initial one of a mapping or list."""
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
        raise _broken(event, f"holds the alias *{event.anchor} within what it stands for")
    return extent


def _refuse_tag(event: Any) -> None:
    tag = event.tag
    if tag in (None, "!") or tag in _TAGS:
        return
    shown = f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag
    raise _broken(event, f"holds the tag {shown}; a config holds plain values alone")


def _broken(event: Any, problem: str) -> UnreadableYAMLError:
    return UnreadableYAMLError(problem=problem, problem_mark=event.start_mark)
