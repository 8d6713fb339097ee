"""Checks of flags and plain words of a call, for every verb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.texts import path_rule
from trainkit.errors import Problem
from trainkit.verbs.support.call import Flag

__all__ = ["repeated_flags", "unusable_paths"]

_REPEATABLE: Final = ("config-dir", "allow-package")
"""Flags whose values accumulate."""


def repeated_flags(found: Mapping[str, Sequence[str]], known: Mapping[str, Flag]) -> Iterator[Problem]:
    """Yield a problem for each flag with one value that is given several times.

    Args:
        found: flag -> its values, in order.
        known: every flag of the call's verb.
    """
    for name, values in found.items():
        if len(values) > 1 and known[name].value is not None and name not in _REPEATABLE:
            rule = f"is given twice: {values[0]} and {values[1]}. Give it once."
            yield Problem(key=f"--{name}", rule=rule, origin=COMMAND_LINE)


def unusable_paths(paths: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each word that no file system accepts as a path."""
    for path in paths:
        if rule := path_rule(path):
            yield Problem(key=path, rule=rule, origin=COMMAND_LINE)
