"""Published speed-ups: a model of a step whose intervals no longer hold them is caught here alone."""

from pathlib import Path

import pytest

from tests.scaling.published import PUBLISHED, Published

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: f"{one.name} {one.replicas}")
def test_a_published_speedup_lies_in_the_predicted_interval_which_the_page_shows(one: Published) -> None:
    found = one.predicted()
    assert all(found.contains(value) for value in one.speedup)
    assert found.high < 2 * found.low  # an interval that holds everything says nothing
    published = " to ".join(f"{value:.3g}" for value in dict.fromkeys(one.speedup))
    row = f"| {one.name} | {one.replicas} | {published} | {found.low:.3g} to {found.high:.3g} | {one.source} |"
    assert row in PAGE.read_text()
