"""A point that is called worse because someone looked often enough is caught here alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from trainkit.sweeps.verdict import ALPHA, standings, t_bound, verdict

# val/loss of recipe=digits after 10 epochs with the seeds 0 to 9: as it is, with a learning rate of 0.008 in place of
# 0.01, and with a change that only rounds, optimizer.eps=2e-8
BASE = [0.643249, 0.644546, 0.639778, 0.642508, 0.641268, 0.639071, 0.639349, 0.640573, 0.641938, 0.638059]
SLOWER = [0.654919, 0.656892, 0.65694, 0.657458, 0.654045, 0.65411, 0.651481, 0.658138, 0.656946, 0.654894]
ALIKE = [0.643316, 0.644546, 0.639679, 0.642325, 0.641268, 0.639128, 0.639355, 0.640627, 0.64194, 0.638055]


def density(t: float, df: int) -> float:
    """Student's density."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi * df)
    return float(scale * (1 + t * t / df) ** (-(df + 1) / 2))


def e_value(t: NDArray[np.float64], n: int, g: float = 4.0) -> NDArray[np.float64]:
    """E of n differences, as the paper writes it by their sum S and sum of squares V, with c^2 = 1/g."""
    mean, c2 = t / math.sqrt(n), 1 / g  # differences with a deviation of 1
    s, v = n * mean, (n - 1) + n * mean**2
    values: NDArray[np.float64] = math.sqrt(c2 / (n + c2)) * ((n + c2) * v / ((n + c2) * v - s**2)) ** (n / 2)
    return values


@pytest.mark.parametrize("n", [2, 4, 10, 30])
def test_without_an_effect_the_evidence_is_one_on_average(n: int) -> None:
    angles = np.linspace(-math.pi / 2, math.pi / 2, 400_002)[1:-1]
    t = np.tan(angles)
    weights = np.array([density(float(x), n - 1) for x in t]) / np.cos(angles) ** 2
    assert np.trapezoid(e_value(t, n) * weights, angles) == pytest.approx(1.0, abs=2e-3)


def test_the_bound_is_where_the_evidence_reaches_one_over_alpha() -> None:
    for n in (4, 10, 30):
        assert e_value(np.array([t_bound(n)]), n)[0] == pytest.approx(1 / ALPHA)
    assert [t_bound(n) for n in (1, 2, 3)] == [math.inf] * 3  # no effect is large enough
    assert [round(t_bound(n), 4) for n in (4, 5, 10, 30)] == [7.214, 5.3574, 3.971, 3.5636]


def test_who_looks_after_every_pair_is_wrong_in_fewer_than_one_of_twenty() -> None:
    draws, n = np.random.default_rng(0).normal(size=(4000, 30)), np.arange(1, 31)
    mean = draws.cumsum(1) / n
    deviation = np.sqrt(((draws**2).cumsum(1) - n * mean**2)[:, 3:] / (n[3:] - 1))
    bounds = np.array([t_bound(int(pairs)) for pairs in n[3:]])
    looks = np.abs(mean[:, 3:]) * np.sqrt(n[3:]) > bounds * deviation
    assert np.mean(looks.any(1)) == 0.02025


def test_measured_losses_are_told_apart_where_they_differ_by_more_than_rounding() -> None:
    answers = []
    for losses in (SLOWER, ALIKE):
        result = verdict([loss - base for loss, base in zip(losses, BASE, strict=True)])
        answers.append((result.answer, round(result.low, 6), round(result.high, 6)))
    assert answers == [("worse", 0.011776, 0.017321), ("not distinguishable yet", -0.000106, 8.6e-05)]
    assert verdict([0.1, 0.1]).answer == "not distinguishable yet"  # two pairs


def test_few_equal_differences_of_a_count_are_no_proof() -> None:
    hits = [1 / 360] * 4
    assert verdict(hits, lower_is_better=False).answer == "better"
    assert verdict(hits, lower_is_better=False, resolution=1 / 360).answer == "not distinguishable yet"


def test_a_candidate_is_out_only_by_the_seeds_that_it_shares_with_a_better_one() -> None:
    table = {"a": dict.fromkeys("0123", 1.0), "b": dict.fromkeys("4567", 2.0), "c": dict.fromkeys("0123", 3.0)}
    assert [(candidate.name, candidate.rival) for candidate in standings(table)] == [("a", ""), ("b", ""), ("c", "a")]
    highest = standings(table, lower_is_better=False)
    assert [(candidate.name, candidate.rival) for candidate in highest] == [("c", ""), ("b", ""), ("a", "c")]
