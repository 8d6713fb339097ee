"""Thin a matrix of parametrized tests to the cases that cover every pair of values.

A module marked `pairwise` runs a part of its cases by default. The factors are the test function and each of its
parameters. Every pair of values that occurs together in some case occurs together in a case that is kept, and every
case that a mutant of `tests/mutants/mutants.yaml` names as its killer is kept. The others are marked `matrix`, which no
lane runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest
import yaml

MUTANTS: Final = Path(__file__).resolve().parents[1] / "mutants" / "mutants.yaml"

Pair = tuple[tuple[str, str], ...]
"""Two factors, each a name and a value."""


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of the modules marked `pairwise` that add no pair of values: `matrix`."""
    modules: dict[Path, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            modules[item.path].append(item)
    if not modules:
        return
    named = killers()
    for cases in modules.values():
        chosen = covering([pairs(case) for case in cases], [case.nodeid in named for case in cases])
        for number, case in enumerate(cases):
            if number not in chosen and case.get_closest_marker("long") is None:
                case.add_marker(pytest.mark.matrix)


def killers() -> frozenset[str]:
    """Return the node ids of the tests that are recorded to kill a mutant."""
    listed = yaml.safe_load(MUTANTS.read_text())
    return frozenset(killer for entry in listed.values() for killer in entry["killers"])


def pairs(case: pytest.Function) -> frozenset[Pair]:
    """Return the pairs of values of a case, its function among them; of a case without parameters its function."""
    callspec = getattr(case, "callspec", None)
    params = {} if callspec is None else callspec.params
    factors = [("", case.originalname), *((name, repr(value)) for name, value in sorted(params.items()))]
    return frozenset(combinations(factors, min(2, len(factors))))


def covering(cases: Sequence[frozenset[Pair]], required: Sequence[bool]) -> frozenset[int]:
    """Choose cases until each pair of values of any case is in a chosen one.

    Args:
        cases: the pairs of each case.
        required: which cases are chosen whatever their pairs are.

    Returns:
        The indices of the chosen cases: the required ones, then one after the other the case with the most pairs
        that no chosen case has, the first of equals.
    """
    chosen = {index for index, keep in enumerate(required) if keep}
    missing = frozenset().union(*cases).difference(*(cases[index] for index in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        chosen.add(best)
        missing -= cases[best]
    return frozenset(chosen)
