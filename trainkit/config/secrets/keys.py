"""Which keys of a config hold secrets: keys with the name of a secret, and fields that a class marks as secret."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, Final

from trainkit.config.values import plain
from trainkit.fields import secret_fields, signature_hints
from trainkit.redaction import secrets_in

_TARGET: Final = "_target_"


def secret_keys(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the secrets of a config that have a key of their own, by their path.

    `trainkit.redaction` decides which names are secret; imported classes add the fields that they mark.
    """
    return dict(secrets_in(values, marks=_marks))


def import_marks(values: Mapping[str, Any], packages: Sequence[str]) -> None:
    """Import the classes of the user's own packages, so that the secrets they mark are known before anything is shown.

    Import errors are ignored here; the check reports them.
    """
    for path, text in texts_in(values) if packages else ():
        if path[-1] == _TARGET and text.partition(".")[0] in packages:
            with contextlib.suppress(Exception):
                import_module(text.rpartition(".")[0])


def marked_in(target: Any, path: tuple[str, ...] = ()) -> frozenset[tuple[str, ...]]:
    """Return the paths that a class marks as secret, including those inside of its dataclass fields."""
    found = {(*path, name) for name in secret_fields(target)}
    for name, hint in signature_hints(target).items():
        kind = plain(hint)
        if isinstance(kind, type) and is_dataclass(kind) and kind is not target:
            found |= marked_in(kind, (*path, name))
    return frozenset(found)


def _marks(node: Mapping[str, Any]) -> frozenset[tuple[str, ...]]:
    """Return the paths marked by the class of a node, if it has been imported already; import nothing."""
    named = node.get(_TARGET)
    parts = named.split(".") if isinstance(named, str) else []
    for length in range(len(parts) - 1, 0, -1):
        target: Any = sys.modules.get(".".join(parts[:length]))
        if target is not None:
            with contextlib.suppress(Exception):  # a module's own __getattr__ may raise anything
                for name in parts[length:]:
                    target = getattr(target, name)
                return marked_in(target)
            break
    return frozenset()


def is_below(path: tuple[str, ...], found: Mapping[tuple[str, ...], Any]) -> bool:
    """Return whether a path lies below one of the paths found."""
    return any(path[:length] in found for length in range(1, len(path)))


def texts_in(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text below a value, also in lists, with its path."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from texts_in(value, (*path, str(key)))
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for index, value in enumerate(values):
            yield from texts_in(value, (*path, str(index)))
    elif isinstance(values, str) and path:
        yield path, values
