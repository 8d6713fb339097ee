"""A value of the wrong type that a key takes, such as true for a number, is caught here alone."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

import pytest

from trainkit.config.values import closest, expected, misfit
from trainkit.fields import above, at_least, below, limits_in, pattern

T = TypeVar("T")


class Colour(enum.Enum):
    red = "r"
    green = "g"


@dataclass(frozen=True)
class Staleness:
    policy: str = "drop"
    bound: int = 3


class Tensor:
    pass


def test_a_value_fits() -> None:
    fitting: list[tuple[object, Any]] = [
        (3, int), (3, float), (0.5, float), (True, bool), ("x", str), (None, type(None)),
        (None, int | None), (3, Optional[int]), ("auto", int | Literal["auto"]), (True, Literal["auto", True]),  # noqa: UP045
        ([1, 2], list[int]), ((1, 2), list[int]), ([0.9, 1], tuple[float, float]), ([1, 2, 3], tuple[int, ...]),
        ([], list[int]), ([1, "x"], Sequence[int | str]), ({"a": 1}, dict[str, int]), ({}, dict),
        ("red", Colour), ("g", Colour), ("/x", Path), ("x", Any), (3, T), (3, Callable[[], int]),
        (3, Tensor), (0.1, Union[float, Tensor]), ({"bound": 3}, Staleness), (3, Annotated[int, at_least(1)]),  # noqa: UP007
    ]  # fmt: skip
    assert [(value, hint) for value, hint in fitting if misfit(value, hint) is not None] == []


@pytest.mark.parametrize(
    ("value", "hint", "rule"),
    [
        (True, int, "must be a whole number."),
        (1, bool, "must be true or false."),
        (3.0, int, "must be a whole number."),
        ("3", int, "is text: it must be a whole number."),
        ("x", float, "must be a number."),
        (float("nan"), float, "must be finite."),
        (float("inf"), float | None, "must be finite."),
        ("sqr", Literal["linear", "sqrt"], "must be linear or sqrt. Did you mean sqrt?"),
        (1, Literal["auto", True], "must be auto or true."),
        ("blue", Colour, "must be r or g."),
        (3, Path, "must be a path."),
        ("abc", list[int], "must be a list of whole numbers."),
        ([1, "x"], list[int], "must be a list of whole numbers."),
        ([0.9], tuple[float, float], "must be a list of 2 numbers."),
        ({"a": "x"}, dict[str, int], "must be a mapping."),
        (3, Staleness, "must be a mapping with the keys policy, bound."),
        ("x", Union[float, Tensor], "must be a number."),  # noqa: UP007
        ("x", int | Literal["auto"] | None, "must be a whole number, auto or null."),
    ],
)
def test_a_value_does_not_fit_in_these_words(value: object, hint: Any, rule: str) -> None:
    assert misfit(value, hint) == rule


def test_limits_apply_to_numbers_only() -> None:
    assert at_least(1).broken_by(0)
    assert not at_least(1).broken_by(1)
    assert above(0).broken_by(0)
    assert below(0, 2).broken_by(2)
    assert not at_least(1).broken_by("auto")
    assert not at_least(1).broken_by(None)
    assert pattern("[a-z]+", "letters.").broken_by("a1")
    assert limits_in(Annotated[int, at_least(1)]) == [at_least(1)]


def test_what_is_expected_is_said_in_words() -> None:
    assert expected(list[Colour]) == "a list of items that are each r or g"
    assert (closest("epohs", ["epochs", "steps"]), closest("zzz", ["epochs", "steps"])) == ("epochs", None)
