"""Policies for stale gradients, computed from variables that other updates have changed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

from trainkit.errors import Problem
from trainkit.fields import at_least, maths

Policy = Literal["accept", "drop", "scale", "lr", "bound"]
"""Policies for staleness: the number of updates since the variables of a gradient were read."""

BOUNDED: Final = ("drop", "bound")
"""Policies that need a bound; the other policies ignore it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The way in which a gradient is applied."""

    takes: bool = True
    """Whether the gradient is applied; else its shards are assigned again."""
    factor: float = 1.0
    """Factor of the gradient."""
    lr_divisor: float = 1.0
    """Divisor of the learning rate of its update."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """The treatment of stale gradients.

    | policy | a gradient of staleness s                                          | source                             |
    |--------|--------------------------------------------------------------------|------------------------------------|
    | accept | is applied unchanged                                               | Dean et al. 2012, section 4.1      |
    | drop   | is discarded if s > bound; its shards are assigned again           |                                    |
    | scale  | is multiplied by 1 / (1 + s): not for Adam, invariant to scale     |                                    |
    | lr     | is applied at the learning rate divided by max(1, s)               | Zhang et al. 2015, 1511.05950 (5)  |
    | bound  | is applied; a worker over bound updates ahead of the slowest waits | Ho et al. 2013, section 2          |

    Example:
        >>> Staleness(policy="scale").decide(3).factor, Staleness(policy="lr").decide(3).lr_divisor
        (0.25, 3.0)
        >>> Staleness(policy="drop", bound=2).decide(3).takes
        False
    """

    policy: Annotated[Policy, maths(neutral="accept")] = "accept"
    """`accept`, `drop` above the bound, `scale` by 1/(1+s), `lr` divided by s, or `bound`: fast workers wait."""
    bound: Annotated[int | None, maths(neutral=None), at_least(0)] = None
    """Number of updates; for `drop` and `bound`."""

    def problems(self) -> list[Problem]:
        """Return problems: a policy without its bound, or a bound without a policy that uses it."""
        key = "strategy.staleness.bound"
        if self.policy in BOUNDED and self.bound is None:
            rule = f"is needed by strategy.staleness.policy={self.policy}. Give a number of updates."
            return [Problem(key=key, value=None, rule=rule)]
        if self.policy not in BOUNDED and self.bound is not None:
            rule = f"has no effect with strategy.staleness.policy={self.policy}. Use drop or bound, or leave it out."
            return [Problem(key=key, value=self.bound, rule=rule)]
        return []

    def decide(self, staleness: int) -> Decision:
        """Decide how a gradient is applied whose variables were updated `staleness` times since they were read."""
        return _DECISIONS[self.policy](staleness, self.bound or 0)

    def may_begin(self, clock: int, slowest: int) -> bool:
        """Return whether a worker may start its next step."""
        return self.policy != "bound" or clock - slowest <= (self.bound or 0)


def staleness_summary(counts: Mapping[int, int]) -> dict[str, Any]:
    """Return the staleness of the updates of a run, as recorded in result.json.

    Example:
        >>> staleness_summary({0: 1, 1: 8, 4: 1})
        {'mean': 1.2, 'p95': 4, 'counts': {'0': 1, '1': 8, '4': 1}}
    """
    total, order = sum(counts.values()), sorted(counts)
    reached = accumulate(counts[number] for number in order)
    return {
        "mean": sum(number * count for number, count in counts.items()) / total,
        "p95": next(number for number, seen in zip(order, reached, strict=True) if seen >= 0.95 * total),
        "counts": {str(number): counts[number] for number in order},
    }


_DECISIONS: Final[Mapping[str, Callable[[int, int], Decision]]] = {
    "accept": lambda _staleness, _bound: Decision(),
    "drop": lambda staleness, bound: Decision(takes=staleness <= bound),
    "scale": lambda staleness, _bound: Decision(factor=1.0 / (1 + staleness)),
    "lr": lambda staleness, _bound: Decision(lr_divisor=float(max(1, staleness))),
    "bound": lambda _staleness, _bound: Decision(),
}
