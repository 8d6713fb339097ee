"""Published speed-ups lie in the predicted intervals, and the page shows the same figures."""

from pathlib import Path

import pytest

from tests.scaling.published import PUBLISHED, Published

ROOT = Path(__file__).resolve().parents[2]


def named(one: Published) -> str:
    return f"{one.name} {one.replicas}"


@pytest.mark.parametrize("one", PUBLISHED, ids=named)
def test_a_published_speedup_lies_in_the_predicted_interval(one: Published) -> None:
    found = one.predicted()
    assert all(found.contains(value) for value in one.speedup)
    assert found.high < 2 * found.low  # an interval that holds everything says nothing


@pytest.mark.parametrize("one", PUBLISHED, ids=named)
def test_the_page_shows_the_figures_of_this_prediction(one: Published) -> None:
    found = one.predicted()
    published = " to ".join(f"{value:.3g}" for value in dict.fromkeys(one.speedup))
    row = f"| {one.name} | {one.replicas} | {published} | {found.low:.3g} to {found.high:.3g} | {one.source} |"
    assert row in (ROOT / "docs" / "scale.md").read_text()
