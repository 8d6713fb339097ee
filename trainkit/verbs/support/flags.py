"""What is wrong with the flags and bare words of a call, whatever its verb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.texts import path_rule
from trainkit.errors import Problem
from trainkit.verbs.support.call import Flag

__all__ = ["repeated_flags", "unusable_paths"]

_REPEATABLE: Final = ("config-dir", "allow-package")
"""Flags whose values add up."""


def repeated_flags(found: Mapping[str, Sequence[str]], known: Mapping[str, Flag]) -> Iterator[Problem]:
    """Refuse flags that have one value and are given several.

    Args:
        found: flag -> its values, in their order.
        known: every flag of the call's verb.
    """
    for name, values in found.items():
        if len(values) > 1 and known[name].value is not None and name not in _REPEATABLE:
            rule = f"is given twice: {values[0]} and {values[1]}. Give it once."
            yield Problem(key=f"--{name}", rule=rule, origin=COMMAND_LINE)


def unusable_paths(paths: Sequence[str]) -> Iterator[Problem]:
    """Refuse words that no file system takes as a path, and that no key is as long as."""
    for path in paths:
        if rule := path_rule(path):
            yield Problem(key=path, rule=rule, origin=COMMAND_LINE)
