"""Texts of environment variables, `${oc.env:X}`, where a number or another plain value is wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainkit.bounded import parse_yaml
from trainkit.config.composition import Composition, KeyPath, TrackedTree, lookup, path_of, variable_in
from trainkit.errors import Problem

_WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


def read_variables(
    composition: Composition, find: Callable[[Composition], list[Problem]]
) -> tuple[Composition, list[Problem]]:
    """Return the composition with texts of variables converted where their keys do not take text, and its problems.

    A problem that remains names the variable.

    Args:
        composition: the result of `compose`.
        find: finds the problems.
    """
    problems = find(composition)
    tried: set[KeyPath] = set()
    while wanted := {path_of(one.key) for one in problems} & composition.variables.keys() - tried:
        tried |= wanted
        tree = TrackedTree()
        tree.values, tree.origins = copy.deepcopy(composition.values), dict(composition.origins)
        for path in wanted:
            found = _converted(composition.variables[path], lookup(composition.values, path))
            tree.put(path, found, tree.origin_of(path))
        composition = replace(composition, values=tree.values, origins=tree.origins)
        problems = find(composition)
    return composition, [_naming(one, composition.variables) for one in problems]


def _converted(raw: Any, value: Any) -> Any:
    """Return a value with the texts of variables as YAML would read them.

    Args:
        raw: the value as it was written, with references.
        value: the value with the references resolved.
    """
    if isinstance(raw, Sequence) and not isinstance(raw, str) and isinstance(value, list) and len(raw) == len(value):
        return [_converted(*pair) for pair in zip(raw, value, strict=True)]
    return _scalar(value) if isinstance(value, str) and variable_in(raw) else value


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text.lstrip().startswith("["):
        try:
            return parse_yaml(text)
        except ValueError:
            return text
    return _WORDS.get(text.strip().lower(), text)


def _naming(problem: Problem, variables: Mapping[KeyPath, Any]) -> Problem:
    raw = variables.get(path_of(problem.key))
    names = [name for item in (raw if isinstance(raw, list) else [raw]) if (name := variable_in(item))]
    if not names:
        return problem
    return replace(problem, rule=f"{problem.rule} It is the value of the environment variable {', '.join(names)}.")
