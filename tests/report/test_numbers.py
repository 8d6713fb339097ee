from __future__ import annotations

import pytest

from trainkit.report.numbers import clock, compact, duration, figure, fixed


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1e-5, "1e-5"), (-0.25, "-0.25"), (99.996, "100"), (1e9, "1e9"), (float("inf"), "inf")],
)
def test_a_figure_has_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.9, "0.9000"), (1234.5, "1,234"), (0.01, "0.0100"), (2e5, "2.000e5")])
def test_a_changing_number_keeps_its_width(value: float, text: str) -> None:
    assert fixed(value) == text


@pytest.mark.parametrize(("value", "text"), [(999.4, "999"), (999_999, "1.00 M"), (12_345, "12.3 k"), (1e15, "1000 T")])
def test_a_large_quantity_is_rounded_before_its_suffix_is_chosen(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.96, "1:00"), (3599.7, "1:00:00"), (float("inf"), "?")])
def test_a_duration_carries_into_the_next_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "0:59"), (59.6, "1:00"), (float("inf"), "-:--")])
def test_a_countdown_keeps_its_form(seconds: float, text: str) -> None:
    assert clock(seconds) == text
