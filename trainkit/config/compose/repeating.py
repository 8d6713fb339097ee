"""Keys and groups that one call gives several times: their order would decide which value counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import Problem
from trainkit.redaction import redacted_argument

__all__ = ["repeated"]


def repeated(arguments: Sequence[Override]) -> list[Problem]:
    """Return a problem for each key or group that several arguments give.

    `optimizer=adamw optimizer.lr=1` names a group and one of its keys, each once. A mapping names every key in it.

    Args:
        arguments: of Hydra's grammar, in their order.
    """
    givers: dict[str, list[str]] = {}
    for argument in arguments:
        for key in dict.fromkeys(_keys(argument)):
            givers.setdefault(key, []).append(redacted_argument(argument.input_line or ""))
    return [
        Problem(key=key, rule=f"is given {_times(len(lines))}: {_listed(lines)}. Give it once.", origin=COMMAND_LINE)
        for key, lines in givers.items()
        if len(lines) > 1
    ]


def _keys(argument: Override) -> Iterator[str]:
    name = argument.key_or_group if argument.package is None else f"{argument.key_or_group}@{argument.package}"
    value = None if argument.is_sweep_override() or argument.is_delete() else argument.value()
    if isinstance(value, Mapping) and value:
        yield from _inner(name, value)
    else:
        yield name


def _inner(name: str, value: Mapping[Any, Any]) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _inner(f"{name}.{key}", item)
        else:
            yield f"{name}.{key}"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _listed(lines: Sequence[str]) -> str:
    shown = [line if len(line) <= 60 else f"{line[:57]}..." for line in lines[:4]]
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(lines) <= 4 else ", ".join(shown) + " and others"
