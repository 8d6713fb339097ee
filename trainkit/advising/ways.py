"""The ways to train a config on up to a given number of devices: strategy, number of devices, precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final

from trainkit.strategies.shipped import SpreadsOver, shipped_strategies

NOT_TRIED: Final = (
    "central_storage, parameter_server, local_sgd and device_map are not tried: they are for parameter servers, slow "
    "links and models that one process splits over devices (docs/which-strategy.md)."
)
"""Why other strategies are absent."""


_FEW: Final = 8
_MOST_COUNTS: Final = 3


@cache
def _strategies() -> Mapping[str, type[SpreadsOver]]:
    """Return the strategies to try, the simplest first."""
    return {one.name: one.kind for one in shipped_strategies() if issubclass(one.kind, SpreadsOver)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train: the arguments to add to the command line."""

    strategy: str
    """The choice of `strategy`; empty if the user has chosen it."""
    devices: int
    """Number of devices; 0 if the strategy of the user decides it."""
    precision: str
    """The choice of `precision` to add; empty to keep that of the config."""
    overrides: tuple[str, ...]
    """Arguments to add to the command line."""

    @property
    def order(self) -> tuple[int, int, bool]:
        """Sort key from the simplest way on: fewer devices, a simpler strategy, the precision of the config."""
        place = list(_strategies()).index(self.strategy) if self.strategy else 0
        return self.devices, place, bool(self.precision)


Family = tuple[Way, ...]
"""Ways of one strategy and precision, the fewest devices first."""


def families(*, devices: int, strategy_given: bool, precisions: tuple[str, ...]) -> Iterator[Family]:
    """Yield the ways, the simplest family first.

    Args:
        devices: the most devices.
        strategy_given: whether the user has chosen the strategy, which then stays.
        precisions: choices of `precision` to try beside that of the config.

    Example:
        >>> found = list(families(devices=4, strategy_given=False, precisions=()))
        >>> [" ".join(way.overrides) for way in found[1]]
        ['strategy=mirrored strategy.replicas=2', 'strategy=mirrored strategy.replicas=4']
    """
    for precision, name in product(("", *precisions), ("",) if strategy_given else _strategies()):
        added = (f"precision={precision}",) if precision else ()
        if strategy_given:
            yield (Way(strategy="", devices=0, precision=precision, overrides=added),)
            continue
        counts = _counts(devices) if _strategies()[name].spread_over(1) else [1]
        found = tuple(
            Way(strategy=name, devices=count, precision=precision, overrides=(*_on(name, count), *added))
            for count in counts
        )
        if found:
            yield found


def _on(name: str, count: int) -> tuple[str, ...]:
    """Return the overrides of a strategy on `count` devices."""
    keys = _strategies()[name].spread_over(count)
    return f"strategy={name}", *(f"strategy.{key}={value}" for key, value in keys.items())


def _counts(devices: int) -> list[int]:
    """Return at most three numbers of devices: the largest, then halves of it (quarters if it is large).

    Example:
        >>> _counts(8), _counts(64), _counts(6), _counts(1)
        ([2, 4, 8], [4, 16, 64], [3, 6], [])
    """
    factor = 2 if devices <= _FEW else 4
    found: list[int] = []
    while devices > 1 and len(found) < _MOST_COUNTS:
        found.insert(0, devices)
        devices //= factor
    return found
