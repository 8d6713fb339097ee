"""Random search: random points of a space."""

from __future__ import annotations

import math
import random

from trainkit.config.compose.space import Choices, Interval, Space


def sample(space: Space, *, trials: int, seed: int) -> list[list[str]]:
    """Draw the arguments of random points: listed values with equal probability, intervals uniformly, or log-uniformly
    under `log`.

    Every value depends only on the seed, the number of its point and its key: a search with more trials begins with the
    same points, and a further key does not change the values of the others.

    Example:
        >>> axis = Interval(key="optimizer.lr", low=0.001, high=0.1, log=True)
        >>> space = Space(lines={"optimizer.lr": ""}, axes=(axis,))
        >>> sample(space, trials=3, seed=0)[:2] == sample(space, trials=2, seed=0)
        True

    Source: Bergstra and Bengio 2012, jmlr.org/papers/v13/bergstra12a.html.
    """
    return [_point(space, f"{seed}/{number}") for number in range(trials)]


def _point(space: Space, key: str) -> list[str]:
    values: dict[str, str] = {}
    for axis in space.axes:
        if isinstance(axis, Choices):
            rng = random.Random(f"{key}/{axis.keys[0]}")  # noqa: S311 - a search, no secret
            values |= zip(axis.keys, rng.choice(axis.rows), strict=True)
        else:
            rng = random.Random(f"{key}/{axis.key}")  # noqa: S311 - the same
            values[axis.key] = axis.text(_number(axis, rng.random()))
    return space.point(values)


def _number(axis: Interval, share: float) -> float:
    """Return the number at a fraction of an interval; integers share it equally."""
    low, high = axis.low, axis.high + (1 if axis.whole else 0)
    value = low * (high / low) ** share if axis.log else low + (high - low) * share
    return min(math.floor(value), axis.high) if axis.whole else value
