"""Tags of config fields: what changing a value may change.

A field says its tag in its annotation, `replicas: Annotated[int, placement] = 2`. Fields without one (a user's own
class, torch's classes) count as maths: nothing that may change the result is ever taken for harmless.

A field that holds a password or a key is marked besides, `pin: Annotated[str, cosmetic, secret]`: its value is neither
written nor printed, and is no part of a fingerprint (docs/secrets.md).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any, Final

__all__ = [
    "Tag",
    "Tagged",
    "cosmetic",
    "maths",
    "placement",
    "secret",
    "secret_fields",
    "signature_hints",
    "speed",
    "tags_of",
]


class Tag(Enum):
    """What a key may change."""

    maths = "maths"
    """Changes the result of the training."""
    placement = "placement"
    """Where the training runs; may not change its result beyond rounding."""
    speed = "speed"
    """How fast it runs; may not change its result."""
    cosmetic = "cosmetic"
    """What is shown or kept; cannot change the result."""


class _NoNeutral:
    def __repr__(self) -> str:
        return "NO_NEUTRAL"


NO_NEUTRAL: Final = _NoNeutral()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """A tag, and for maths the neutral value: that of the training of one device, which no fingerprint hashes."""

    tag: Tag
    neutral: Any = NO_NEUTRAL

    def __call__(self, *, neutral: Any) -> Tagged:
        """The same tag with a neutral value.

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


secret: Final = _Secret()
"""Mark of a field whose value is neither written nor printed, beside its tag."""


def secret_fields(target: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of a class or function that are marked `secret`.

    Args:
        target: a class (its constructor's parameters count) or a function.

    Example:
        >>> def f(user: str, pin: typing.Annotated[str, cosmetic, secret]): ...
        >>> secret_fields(f)
        frozenset({'pin'})
    """
    hints = signature_hints(target)
    return frozenset(name for name, hint in hints.items() if secret in getattr(hint, "__metadata__", ()))


def tags_of(target: Callable[..., Any]) -> Mapping[str, Tagged]:
    """The tag of every parameter of a class or function; maths where it says nothing.

    Args:
        target: a class (its constructor's parameters count) or a function.

    Returns:
        Parameter name -> tag, in the order of the signature; empty where there is no readable signature.

    Example:
        >>> def f(replicas: typing.Annotated[int, placement], lr: float): ...
        >>> {name: tagged.tag.value for name, tagged in tags_of(f).items()}
        {'replicas': 'placement', 'lr': 'maths'}
    """
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
    hints = signature_hints(target)
    return {name: _tag_in(hints.get(name)) for name in names}


def signature_hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    """Parameter -> its annotation, with tags and limits; empty where they cannot be resolved.

    A dataclass is asked itself, not its constructor: that one's annotations are text, and those of inherited fields
    name what their own module imports, which the module of the subclass need not.

    Args:
        target: a class or function.
    """
    subject = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return typing.get_type_hints(subject, include_extras=True)
    except Exception:  # noqa: BLE001 - another package's annotations may name what does not exist at run time
        return {}


def _tag_in(hint: Any) -> Tagged:
    found = (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Tagged))
    return next(found, maths)
