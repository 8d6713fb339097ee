"""The points of a sweep or comparison, all of them composed and checked before the first is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.config.check import check_names, check_values
from trainkit.config.compose import Composer, foreign_keys
from trainkit.config.composition import Composition
from trainkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from trainkit.verbs.call import Call

__all__ = ["checked_points"]


def checked_points(call: Call) -> list[Composition]:
    """Compose and check every combination of the comma lists of a call."""
    composer = Composer(call.config_dirs, call.packages)
    points = [
        (composer.compose(line), composer.compose(line, for_others=True)) for line in composer.points(call.overrides)
    ]
    problems = _applying_nowhere([plain for plain, _ in points])
    compositions = [composition for _, composition in points]
    for phase in (lambda one: check_names(one, multirun=True), check_values):
        found = [problem for composition in compositions for problem in phase(composition)]
        problems = list({str(problem): problem for problem in [*problems, *found]}.values())
        if problems:
            raise ConfigError(problems)
    return compositions


def _applying_nowhere(compositions: list[Composition]) -> list[Problem]:
    """Keys of a group that none of the points' choices has."""
    foreign = [foreign_keys(composition) for composition in compositions]
    nowhere = set.intersection(*foreign) if foreign else set()
    if not nowhere:
        return []
    return [problem for problem in check_names(compositions[0], multirun=True) if problem.key in nowhere]
