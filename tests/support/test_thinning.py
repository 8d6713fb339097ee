"""Thinned matrices keep every pair of values and every killer of a mutant."""

from itertools import product
from typing import Any

from tests.support.thinning import covering, killers


def cases(*axes: str) -> list[frozenset[Any]]:
    return [
        frozenset((f"{i}{a}", f"{j}{b}") for i, a in enumerate(chosen) for j, b in enumerate(chosen) if i < j)
        for chosen in product(*axes)
    ]


def test_the_chosen_cases_hold_every_pair() -> None:
    every = cases("abcd", "xy", "12", "+-")
    chosen = covering(every, [False] * len(every))
    assert frozenset().union(*(every[place] for place in chosen)) == frozenset().union(*every)
    assert len(every) == 32
    assert len(chosen) <= 10


def test_what_is_kept_is_chosen_and_its_pairs_count() -> None:
    every = cases("ab", "xy")
    assert covering(every, [False, True, False, False]) == {0, 1, 2, 3}
    every = cases("ab", "xy", "12")
    assert 7 in covering(every, [place == 7 for place in range(8)])
    assert len(covering(every, [place == 7 for place in range(8)])) < 8


def test_the_killers_of_the_mutants_are_read() -> None:
    assert "tests/contract/test_randomness.py::test_masks_are_those_that_the_keys_give[1]" in killers()
