"""Tags of config fields, what changing a value can affect, and limits of their values.

A field declares its tag in its annotation, `replicas: Annotated[int, placement] = 2`. Fields without one (of a user's
own class, of torch's classes) count as maths: a key that can change the result is never treated as harmless.

A field that holds a password or a key is also marked, `pin: Annotated[str, cosmetic, secret]`: its value is neither
written nor printed, and is not part of a fingerprint (docs/config.md#secrets).
"""

from __future__ import annotations

import inspect
import math
import os
import stat
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast


class Tag(Enum):
    """The effect that a key can have."""

    maths = "maths"
    """The key changes the result of the training."""
    placement = "placement"
    """The key changes where the training runs; must not change its result beyond rounding."""
    speed = "speed"
    """The key changes how fast the training runs; must not change its result."""
    cosmetic = "cosmetic"
    """The key changes what is shown or kept; cannot change the result."""


class _NoNeutral:
    def __repr__(self) -> str:
        return "NO_NEUTRAL"


NO_NEUTRAL: Final = _NoNeutral()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """A tag, and for maths the baseline value: that of training on one device, excluded from fingerprints."""

    tag: Tag
    neutral: Any = field(default=NO_NEUTRAL, hash=False)  # which may be a list

    def __call__(self, *, neutral: Any) -> Tagged:
        """Return the same tag with a baseline value.

        Example:
            >>> maths(neutral="none").neutral
            'none'
        """
        return Tagged(tag=self.tag, neutral=neutral)


maths: Final = Tagged(tag=Tag.maths)
placement: Final = Tagged(tag=Tag.placement)
speed: Final = Tagged(tag=Tag.speed)
cosmetic: Final = Tagged(tag=Tag.cosmetic)


class _Secret:
    def __repr__(self) -> str:
        return "secret"


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a field's value, which `explain` and the schema of the config show."""

    name: str


def unit(name: str) -> Unit:
    """Return a mark for an annotation that states the unit of its field.

    Example:
        >>> typing.Annotated[float, placement, unit("GiB")].__metadata__[1]
        Unit(name='GiB')
    """
    return Unit(name)


secret: Final = _Secret()
"""Marks a field whose value is neither written nor printed, in addition to its tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """A mark of an annotation whose value names a file or folder that exists before the run: it is only read.

    The check of a config reports a value that breaks it (exit code 2), except for `plan` without `--open-data`.

    Example:
        >>> a_file.rule("."), a_folder.rule(".")
        ('is a folder, and a file is needed.', None)
    """

    kind: Literal["file", "folder", "either"] = "either"
    """What the value names."""
    words: tuple[str, ...] = ()
    """Values that name nothing, such as auto."""
    unless: str = ""
    """A key of the same class; if it is true, the run creates what is missing."""

    def rule(self, path: str | Path, *, may_be_absent: bool = False) -> str | None:
        """Return what is wrong with a path, as messages show it; None if it can be used."""
        noun = "file or folder" if self.kind == "either" else self.kind
        if not str(path):
            return f"is empty. Name a {noun}."
        try:
            mode = (expanded := Path(path).expanduser()).stat().st_mode
        except FileNotFoundError:
            where = "" if expanded.is_absolute() else f" below {Path.cwd()}"
            rule = "is a link to nothing." if expanded.is_symlink() else f"there is no such {noun}{where}."
            return None if may_be_absent else rule
        except (OSError, ValueError, RuntimeError) as error:  # no permission; a null character; no home folder
            return f"cannot be read: {getattr(error, 'strerror', None) or error}."
        what = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "pipe or device"
        if what in noun.split(" or "):
            return None if os.access(expanded, os.R_OK) else "cannot be read: Permission denied."
        return f"is a {what}, and a {noun} is needed."


a_file: Final = Reads(kind="file")
"""Marks a field whose value names a file that a run reads."""
a_folder: Final = Reads(kind="folder")
"""Marks a field whose value names a folder that a run reads."""


Mark = TypeVar("Mark")


def marks_in(hint: Any, kind: type[Mark]) -> list[Mark]:
    """Return the marks of an annotation that are of one kind: `Tagged`, `Limit`, `Reads`, `Unit`."""
    return [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlyWith:
    """Keys of a class that have an effect only if another of its keys has a certain value.

    A class declares them as `only_with: ClassVar[OnlyWith]`: elsewhere they are no part of its fingerprint.

    Example:
        >>> scaling = OnlyWith(keys=("scale",), key="value", value="fp16_mixed", reason="has no effect.")
        >>> scaling.unused({"value": "fp32", "scale": 2.0}), scaling.unused({"value": "fp16_mixed", "scale": 2.0})
        (('scale',), ())
    """

    keys: tuple[str, ...]
    """The keys without effect otherwise."""
    key: str
    """The deciding key."""
    value: object
    """Value of the deciding key with which they have an effect."""
    reason: str
    """Rule for the error about a key without effect."""

    def unused(self, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of a node of the config that have no effect."""
        return () if node.get(self.key) == self.value else tuple(name for name in self.keys if name in node)


def secret_fields(target: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of a class or function that are marked `secret`.

    Example:
        >>> def f(user: str, pin: typing.Annotated[str, cosmetic, secret]): ...
        >>> secret_fields(f)
        frozenset({'pin'})
    """
    hints = signature_hints(target)
    return frozenset(name for name, hint in hints.items() if secret in getattr(hint, "__metadata__", ()))


def tags_of(target: Callable[..., Any]) -> Mapping[str, Tagged]:
    """Return the tag of every parameter of a class or function; maths without a tag.

    Args:
        target: a class (its constructor's parameters count) or a function.

    Returns:
        Parameter name -> tag, in the order of the signature; empty if there is no readable signature.

    Example:
        >>> def f(replicas: typing.Annotated[int, placement], lr: float): ...
        >>> {name: tagged.tag.value for name, tagged in tags_of(f).items()}
        {'replicas': 'placement', 'lr': 'maths'}
    """
    return _tags_of_class(cast("Hashable", target)) if isinstance(target, type) else _tags(target)


def _tags(target: Callable[..., Any]) -> Mapping[str, Tagged]:
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
    hints = signature_hints(target)
    return MappingProxyType({name: tag_in(hints.get(name)) for name in names})


_tags_of_class: Final = lru_cache(maxsize=512)(_tags)  # a fingerprint asks once for each key


def signature_hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    """Return parameter -> annotation, with tags and limits; empty if the annotations cannot be resolved.

    For a dataclass, the class itself is inspected instead of its constructor, whose annotations are text: annotations
    of inherited fields use names of the module of the base class, which the module of the subclass may not import.

    Args:
        target: a class or function.
    """
    subject = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return _resolved_hints(subject)
    except Exception:  # noqa: BLE001 - another package's annotations may name what does not exist at run time
        return {}


@lru_cache(maxsize=1024)  # one check of a config asks hundreds of times
def _resolved_hints(subject: Callable[..., Any]) -> Mapping[str, Any]:
    return MappingProxyType(typing.get_type_hints(subject, include_extras=True))


def tag_in(hint: Any) -> Tagged:
    """Return the tag of an annotation; maths without one."""
    return next(iter(marks_in(hint, Tagged)), maths)


BROKEN: Final = "limit"
"""The type of pydantic's error about a broken limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A rule about a value beyond its type, part of an annotation: `Annotated[int, at_least(1)]`."""

    rule: str
    """The rule as messages show it: `must be at least 1.`."""
    low: float = -math.inf
    """Smallest value."""
    high: float = math.inf
    """Largest value."""
    open_low: bool = False
    """True where `low` itself is refused."""
    open_high: bool = False
    """True where `high` itself is refused."""
    regex: str | None = None
    """The regular expression that the whole text must match."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Let pydantic check the limit after the type."""
        from pydantic_core import PydanticCustomError, core_schema  # noqa: PLC0415 - only a check of a config needs it

        def checked(value: Any) -> Any:
            if self.broken_by(value):
                raise PydanticCustomError(BROKEN, self.rule)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Describe the limit in a JSON Schema."""
        json_schema = dict(handler(schema))
        if math.isfinite(self.low):
            json_schema["exclusiveMinimum" if self.open_low else "minimum"] = self.low
        if math.isfinite(self.high):
            json_schema["exclusiveMaximum" if self.open_high else "maximum"] = self.high
        return json_schema if self.regex is None else {**json_schema, "pattern": f"^(?:{self.regex})$"}

    def broken_by(self, value: Any) -> bool:
        """Return whether a value of a fitting type breaks the limit; null and words pass.

        Example:
            >>> at_least(1).broken_by(0), at_least(1).broken_by("auto")
            (True, False)
        """
        if self.regex is not None:
            import re  # noqa: PLC0415 - only a name that is text needs it

            return isinstance(value, str) and re.fullmatch(self.regex, value) is None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        too_low = value <= self.low if self.open_low else value < self.low
        too_high = value >= self.high if self.open_high else value > self.high
        return too_low or too_high


def at_least(low: float) -> Limit:
    """Require `low` or more."""
    return Limit(rule=f"must be at least {low}.", low=low)


def at_most(high: float) -> Limit:
    """Require `high` or less."""
    return Limit(rule=f"must be {high:,} or less.", high=high)


def above(low: float) -> Limit:
    """Require more than `low`."""
    return Limit(rule=f"must be more than {low}.", low=low, open_low=True)


def within(low: float, high: float) -> Limit:
    """Require a value from `low` to `high`, both included."""
    return Limit(rule=f"must be at least {low} and at most {high}.", low=low, high=high)


def below(low: float, high: float) -> Limit:
    """Require a value from `low` up to, not including, `high`."""
    return Limit(rule=f"must be at least {low} and less than {high}.", low=low, high=high, open_high=True)


def pattern(regex: str, rule: str) -> Limit:
    """Require text that matches a regular expression."""
    return Limit(rule=rule, regex=regex)
