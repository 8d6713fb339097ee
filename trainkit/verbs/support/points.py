"""Compose and check all points of a sweep or comparison before the first one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from trainkit.config.check import NEEDS_VALUE, check_names, check_names_first, check_values
from trainkit.config.check.recipe_keys import fitted
from trainkit.config.compose import Composer, foreign_keys
from trainkit.config.composition import Composition, problems_of_points
from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import ConfigError, Problem, refuse


def checked_points(overrides: Sequence[str], config_dirs: Sequence[Path], packages: Sequence[str]) -> list[Composition]:
    """Compose and check every combination of the comma lists of some arguments."""
    composer = Composer(config_dirs, packages)
    return with_values(_composed(composer, composer.points(overrides)))


def sweep_points(overrides: Sequence[str], config_dirs: Sequence[Path], packages: Sequence[str]) -> list[Composition]:
    """Compose the points of a sweep, and check their names, which is fast; `with_values` checks the rest.

    They are all points, or for a search a few points that contain every value. Empty for a sweeper of another package:
    its points cannot be known in advance.
    """
    from trainkit.sweeps.spaces.request import read_request  # noqa: PLC0415 - for sweeps only

    composer = Composer(config_dirs, packages)
    rule = "is about the sweep as a whole: give it one value."
    items = [item for item in composer.parse(overrides)[0] if item.is_sweep_override()]
    swept = [(item.key_or_group, item.get_value_string()) for item in items if item.key_or_group.startswith("sweep.")]
    if swept:
        raise ConfigError(Problem(key=key, value=text, rule=rule, origin=COMMAND_LINE) for key, text in swept)
    return _composed(composer, read_request(composer, overrides).points)


def key_problems(
    overrides: Sequence[str], config_dirs: Sequence[Path], packages: Sequence[str], *, sweeps: bool
) -> list[Problem]:
    """Return the problems of the keys of some arguments, or of a sweep, that are found without importing a class.

    Absent values are no problem: they may be what the command asks for.
    """
    composer = Composer(config_dirs, packages)
    try:
        if sweeps:
            sweep_points(overrides, config_dirs, packages)
        else:
            _composed(composer, composer.points(overrides))
    except ConfigError as error:
        return [problem for problem in error.problems if not problem.rule.startswith(NEEDS_VALUE)]
    return []


def _composed(composer: Composer, lines: Sequence[Sequence[str]]) -> list[Composition]:
    """Compose points, and check the names of their keys and choices."""
    plain = [composer.compose(line) for line in lines]
    foreign = [foreign_keys(composition) for composition in plain]
    compositions = [
        composer.compose(line, for_others=True) if keys else composition
        for line, keys, composition in zip(lines, foreign, plain, strict=True)
    ]
    return _checked(compositions, partial(check_names_first, multirun=True), keys_no_choice_has(plain, foreign))


def with_values(points: Sequence[Composition]) -> list[Composition]:
    """Return points whose names are checked, after the check of their values, which imports their classes.

    Raises:
        ConfigError: the problems of all points.
    """
    return _checked(points, check_values)


def _checked(
    points: Sequence[Composition], check: Callable[[Composition], list[Problem]], problems: Iterable[Problem] = ()
) -> list[Composition]:
    results = [fitted(point, check) for point in points]
    points = [point for point, _ in results]
    merged = problems_of_points(points, [of_point for _, of_point in results])
    refuse(list({str(problem): problem for problem in [*problems, *merged]}.values()))
    return points


def keys_no_choice_has(compositions: Sequence[Composition], foreign: Sequence[set[str]]) -> list[Problem]:
    """Return problems of keys of a group that no choice of the points has."""
    nowhere = set.intersection(*foreign) if foreign else set()
    if not nowhere:
        return []
    return [problem for problem in check_names(compositions[0], multirun=True) if problem.key in nowhere]
