"""Fit a composition to the keys that the user set: leave out impossible ones, read texts of variables as numbers.

Keys that the user did not set and that the user's own keys make impossible are left out, with a note. There are two
kinds: keys of a recipe, which must never block the user's own keys, and keys of a choice whose `_target_` the user
replaced. A key that the user set is never left out. Texts of environment variables, `${oc.env:X}`, are converted where
a key takes a number or another plain value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainkit.config.compose import Composer, group_in
from trainkit.config.composition import (
    DEFAULT,
    Composition,
    KeyPath,
    Level,
    Origin,
    TrackedTree,
    dotted,
    lookup,
    path_of,
    variable_in,
)
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.errors import Problem
from trainkit.files import parse_yaml

Find = Callable[[Composition], list[Problem]]
"""Function that finds the problems of a composition."""


def fitted(composition: Composition, find: Find) -> tuple[Composition, list[Problem]]:
    """Return the composition without keys that the user's keys make impossible, and the other problems.

    Texts of environment variables become numbers where their keys take numbers. A key that is left out takes the value
    of the files below the recipe; the setting of a group of parameters may become impossible with it.

    Args:
        composition: the result of `compose`.
        find: finds the problems.
    """
    composition, problems = read_variables(composition, find)
    broken: set[str] | None = None
    while True:
        of_files = [problem for problem in problems if problem.origin != COMMAND_LINE]  # not of an argument itself
        displaced = [problem for problem in of_files if _replaced_node(composition, path_of(problem.key))]
        others = [problem for problem in of_files if problem not in displaced]
        of_recipe = [problem for problem in others if is_of_recipe_alone(composition, path_of(problem.key))]
        if of_recipe and broken is None:
            broken = _broken_by_itself(composition, find)
        impossible = [*displaced, *(problem for problem in of_recipe if problem.key not in (broken or ()))]
        if not impossible:
            return composition, problems
        composition, problems = read_variables(_without(composition, impossible), find)


def _replaced_node(composition: Composition, path: KeyPath) -> KeyPath | None:
    """Return the node above a key whose class was replaced, by a recipe or above, after the key was set for another."""
    if not _is_not_of_user(composition, path):
        return None
    nodes = (path[:length] for length in range(len(path) - 1, 0, -1))
    node = next((node for node in nodes if (*node, TARGET) in composition.origins), None)
    return node if node and composition.origins[path].rank < composition.origins[(*node, TARGET)].rank else None


def _is_not_of_user(composition: Composition, path: KeyPath) -> bool:
    """Return whether no source above the recipe set a key, or a key below it."""
    below = [origin for key, origin in composition.origins.items() if key[: len(path)] == path]
    return path in composition.origins and all(origin.level <= Level.recipe for origin in below)


def is_of_recipe_alone(composition: Composition, path: KeyPath) -> bool:
    """Return whether a recipe set a key, or chose a callback or logger, and no other source set a key below it."""
    of_recipe = _chosen_by_recipe(composition, path) or composition.origin(path).level is Level.recipe
    return _is_not_of_user(composition, path) and of_recipe


def _chosen_by_recipe(composition: Composition, path: KeyPath) -> bool:
    """Return whether the choice of a callback or logger, `("callbacks", "sample")`, is that of a recipe alone."""
    if len(path) != 2 or path[0] not in LIST_GROUPS or path[0] in composition.given_keys:
        return False
    levels = [
        file.level
        for file in composition.files
        for item in file.document.defaults
        if isinstance(item, Mapping) and path[0] in map(group_in, map(str, item))
    ]
    return max(levels, default=Level.defaults) is Level.recipe


def _broken_by_itself(composition: Composition, find: Find) -> set[str]:
    """Return the keys that have problems in the recipe alone: the user's keys did not cause them."""
    recipe = f"recipe={composition.choices.get('recipe') or 'null'}"
    alone = Composer(composition.config_dirs, composition.packages).compose([recipe])
    return {problem.key for problem in find(alone)}


def _without(composition: Composition, impossible: Sequence[Problem]) -> Composition:
    """Return the composition with the values of lower files in place of impossible keys, and a note for each."""
    tree, notes = TrackedTree(), list(composition.notes)
    tree.values, tree.origins = copy.deepcopy(composition.values), dict(composition.origins)
    for problem in impossible:
        path = path_of(problem.key)
        value, node = lookup(composition.values, path), _replaced_node(composition, path)
        target = f"with {dotted(node)}.{TARGET}={lookup(composition.values, (*node, TARGET))}" if node else ""
        rule = f"is left out {target or 'of the recipe'}: {problem.rule}"
        notes.append(str(composition.problem(path, rule, value=value, show_value=not isinstance(value, dict))))
        tree.remove(path)
        if node is None and (below := _value_below(composition, path)) is not None:
            tree.put(path, *below)
    keys = {problem.key for problem in impossible}
    problems = tuple(problem for problem in composition.problems if problem.key not in keys)
    return replace(composition, values=tree.values, origins=tree.origins, notes=tuple(notes), problems=problems)


def _value_below(composition: Composition, path: KeyPath) -> tuple[Any, Origin] | None:
    """Return the value of a key, and its origin, that the files below the recipe set; None if they set none."""
    for rank, file, value in composition.set_below_recipe(path):
        return copy.deepcopy(value), file.origin(path, rank)
    above = lookup(RunConfig().to_dict(), path[:-1]) if path[0] not in GROUPS else {}
    return (above[path[-1]], DEFAULT) if isinstance(above, dict) and path[-1] in above else None


_WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}


def read_variables(composition: Composition, find: Find) -> tuple[Composition, list[Problem]]:
    """Return the composition with texts of variables converted where their keys do not take text, and its problems.

    A problem that remains names the variable.

    Args:
        composition: the result of `compose`.
        find: finds the problems.
    """
    problems = find(composition)
    tried: set[KeyPath] = set()
    while paths := {path_of(problem.key) for problem in problems} & composition.variables.keys() - tried:
        tried |= paths
        tree = TrackedTree()
        tree.values, tree.origins = copy.deepcopy(composition.values), dict(composition.origins)
        for path in paths:
            value = _converted(composition.variables[path], lookup(composition.values, path))
            tree.put(path, value, tree.origin_of(path))
        composition = replace(composition, values=tree.values, origins=tree.origins)
        problems = find(composition)
    return composition, [_with_variables(problem, composition.variables) for problem in problems]


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


def _with_variables(problem: Problem, variables: Mapping[KeyPath, Any]) -> Problem:
    raw = variables.get(path_of(problem.key))
    names = [name for item in (raw if isinstance(raw, list) else [raw]) if (name := variable_in(item))]
    if not names:
        return problem
    return replace(problem, rule=f"{problem.rule} It is the value of the environment variable {', '.join(names)}.")
