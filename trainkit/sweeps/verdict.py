"""Is one candidate better than another? Answers that stay valid however often one looks at a growing number of seeds.

A pair is two trainings with one seed, with the same order of samples and the same initial weights; its difference is
the metric of B minus that of A. For n differences of mean m and standard deviation s, and t = (m - u) sqrt(n) / s, the
Gaussian mixture of the scale-invariant t-martingale is

    E(u) = (1 + n g)^(-1/2) [(1 + t^2/(n-1)) / (1 + t^2/((n-1)(1 + n g)))]^(n/2)

For independent normal differences of mean u, E(u) is a nonnegative martingale that begins at 1, and it ever exceeds
1/alpha with probability at most alpha (Ville). The interval is {u: E(u) < 1/alpha}; effects near sqrt(g) s are found
fastest.

Source: Wang and Ramdas 2025, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance",
Sequential Analysis 44(1), arXiv:2310.03722, theorem 4.9, there with c^2 = 1/g.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev, variance
from typing import Final, Literal

G: Final = 4.0
"""The variance of the mixture, in those of a difference."""
FEWEST: Final = 4
"""Pairs below which nothing is concluded."""
ALPHA: Final = 0.05
"""Bound on the probability that any answer, at any time, is wrong."""

BUDGET: Final = 30
"""Pairs in all, beyond which no number of missing pairs is named."""

Answer = Literal["better", "worse", "the same", "the same bits", "the same within delta", "not distinguishable yet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The comparison of B with A."""

    answer: Answer
    """Whether B is better or worse."""
    difference: float
    """The mean of B - A."""
    low: float
    """Lower bound of that mean."""
    high: float
    """Upper bound of that mean."""
    more_pairs: int | None = None
    """Pairs that are missing if mean and deviation stay as they are; None: more than the budget."""


@cache
def t_bound(pairs: int, alpha: float = ALPHA, g: float = G) -> float:
    """Return the |t| from which E is 1 / alpha; infinite where no t suffices.

    t^2 = (n-1)(K-1) / (1 - K/(1+ng)), K = ((1+ng) / alpha^2)^(1/n).

    Example:
        >>> t_bound(2), round(t_bound(4), 2), round(t_bound(30), 2)
        (inf, 7.21, 3.56)
    """
    if pairs < 2:
        return math.inf
    k, most = ((1 + pairs * g) / alpha**2) ** (1 / pairs), 1 + pairs * g
    return math.sqrt((pairs - 1) * (k - 1) / (1 - k / most)) if k < most else math.inf


def verdict(
    differences: Sequence[float],
    alpha: float = ALPHA,
    *,
    lower_is_better: bool = True,
    resolution: float = 0.0,
    delta: float | None = None,
    budget: int = BUDGET,
) -> Verdict:
    """Judge the differences B - A of all pairs so far.

    Args:
        differences: one finite number per pair, at least one.
        alpha: bound on the probability that the answer, at any time, is wrong.
        lower_is_better: the direction of the metric.
        resolution: the smallest step of the metric, 1/360 for an accuracy over 360 samples. Its square / 4 is added to
            the variance: equal small differences would otherwise have a deviation of 0, and t would be infinite.
        delta: a mean that is nearer to 0 does not matter: "the same within delta" once the interval lies inside.
        budget: pairs in all, beyond which `more_pairs` is None.

    Example:
        >>> verdict([0.2, 0.21, 0.19, 0.2]).answer, verdict([0.2, -0.1, 0.3, 0.1]).answer
        ('worse', 'not distinguishable yet')
        >>> verdict([0.2, -0.1, 0.3, 0.1, 0.2]).more_pairs, verdict([0.2, 0.21, 0.19, 0.2], delta=0.5).answer
        (12, 'worse')
    """
    pairs, mean = len(differences), fmean(differences)
    deviation = math.sqrt((variance(differences) if pairs > 1 else 0.0) + resolution**2 / 4) or math.ulp(0.0)

    def radius(total: int) -> float:
        return t_bound(total, alpha) * deviation / math.sqrt(total)

    def answer(total: int) -> Answer:
        if total >= FEWEST and abs(mean) > radius(total):
            return "better" if (mean < 0) == lower_is_better else "worse"
        within = total >= FEWEST and delta is not None and abs(mean) + radius(total) < delta
        return "the same within delta" if within else "not distinguishable yet"

    totals = range(pairs, max(budget, pairs) + 1)
    more = next((total - pairs for total in totals if answer(total) != "not distinguishable yet"), None)
    low, high = mean - radius(pairs), mean + radius(pairs)
    return Verdict(answer=answer(pairs), difference=mean, low=low, high=high, more_pairs=more)


def far_pair(differences: Sequence[float]) -> int | None:
    """Return the index of a difference that is too far from the mean of the others to be a normal one; None without.

    The bound is 3.6 + 15 / (n - 3) deviations of the others, which about one of 100 sets of n normal differences passes
    (Grubbs 1950: 11.4 for n = 5, 5.3 for 10, 4.1 for 30).

    Example:
        >>> far_pair([0.1, 0.12, 0.11, 3.0, 0.09]), far_pair([0.1, 0.2, 0.05, 0.3, 0.15])
        (3, None)
    """
    if len(differences) < FEWEST:
        return None
    mean = fmean(differences)
    index = max(range(len(differences)), key=lambda i: abs(differences[i] - mean))
    others = [*differences[:index], *differences[index + 1 :]]
    far = 3.6 + 15 / (len(differences) - 3)
    return index if abs(differences[index] - fmean(others)) > far * stdev(others) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One candidate among all."""

    name: str
    seeds: int
    """Number of its values."""
    rival: str = ""
    """The candidate that is better; empty if it may be the best."""
    verdict: Verdict | None = None
    """The comparison with the rival; None if it may be the best."""


def standings(
    table: Mapping[str, Mapping[str, float]],
    alpha: float = ALPHA,
    *,
    lower_is_better: bool = True,
    resolution: float = 0.0,
) -> list[Standing]:
    """Return the candidates by their means; `table` has the value of each candidate for each of its seeds.

    Each of k is compared, over the seeds that both have, with all of better mean, at alpha / (k - 1), and is out if it
    is worse than one of them. So the truly best is out with probability at most alpha (Bonferroni over its k - 1
    comparisons; such sets: Gupta 1965, subset selection; Hsu 1984, multiple comparisons with the best).

    Example:
        >>> losses = {"a": [1.0, 1.1, 0.9, 1.0], "b": [1.2, 1.31, 1.09, 1.2], "c": [1.1, 1.0, 1.0, 1.0]}
        >>> table = {name: dict(zip("0123", values)) for name, values in losses.items()}
        >>> [(item.name, item.rival) for item in standings(table)]
        [('a', ''), ('c', ''), ('b', 'a')]
    """
    sign = 1 if lower_is_better else -1
    order = sorted(table, key=lambda name: sign * fmean(table[name].values()))
    level = alpha / max(len(table) - 1, 1)
    ranked = []
    for index, name in enumerate(order):
        standing = Standing(name=name, seeds=len(table[name]))
        for rival in order[:index]:
            pairs = [value - table[rival][seed] for seed, value in table[name].items() if seed in table[rival]]
            test = verdict(pairs, level, lower_is_better=lower_is_better, resolution=resolution) if pairs else None
            if test is not None and test.answer == "worse":
                standing = replace(standing, rival=rival, verdict=test)
                break
        ranked.append(standing)
    return ranked


_MOST_COUNTED: Final = 10_000
"""Samples beyond which the step of a count is far below the noise of seeds."""
_ROUNDING: Final = 2e-7
"""Largest relative error of a fraction: that of one in float32."""


def resolution_of(figures: Iterable[float]) -> float:
    """Return the step of values that are counts over one number of samples; 0 for others, such as a mean loss.

    That number is the smallest one up to 10,000 of which all values are fractions; chance finds none for eight values.

    Example:
        >>> resolution_of([0.5, 0.75, 0.75, 1.0]), resolution_of([0.64701836, 0.64340172, 0.63940158, 0.64512311])
        (0.25, 0.0)
    """
    values = sorted({*figures})
    for size in range(1, _MOST_COUNTED + 1):
        if all(math.isclose(value * size, round(value * size), rel_tol=_ROUNDING) for value in values):
            counts = [round(value * size) for value in values]
            return (math.gcd(*(later - earlier for earlier, later in pairwise(counts))) or 1) / size
    return 0.0


def sentences(candidates: Sequence[Standing]) -> Iterator[str]:
    """Yield which candidates may be the best, and by how much each of the others is worse than one of them.

    Example:
        >>> worse = Verdict(answer="worse", difference=0.2, low=0.13, high=0.27)
        >>> for line in sentences([Standing(name="a", seeds=4), Standing(name="b", seeds=4, rival="a", verdict=worse)]):
        ...     print(line)
        may be best: a (4 seeds)
        b worse than a by 0.2 [0.13, 0.27]
    """
    best = [candidate for candidate in candidates if candidate.verdict is None]
    low, high = min(candidate.seeds for candidate in best), max(candidate.seeds for candidate in best)
    seeds = f"{low} seed{'' if low == 1 else 's'}" if low == high else f"{low} to {high} seeds"
    hint = f"; nothing is concluded from fewer than {FEWEST}" if high < FEWEST else ""
    yield f"may be best: {', '.join(candidate.name for candidate in best)} ({seeds}{hint})"
    for candidate in candidates:
        if candidate.verdict is not None:
            low_by, high_by = sorted(map(abs, (candidate.verdict.low, candidate.verdict.high)))
            gap = abs(candidate.verdict.difference)
            yield f"{candidate.name} worse than {candidate.rival} by {gap:.4g} [{low_by:.4g}, {high_by:.4g}]"
