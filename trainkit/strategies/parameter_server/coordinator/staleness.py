"""What becomes of a gradient that was computed from variables which others have updated meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Final, Literal

from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths

__all__ = ["BOUNDED", "Decision", "Policy", "Staleness", "staleness_summary"]

Policy = Literal["accept", "drop", "scale", "lr", "bound"]
"""What is done about staleness: the updates that the variables have seen since a gradient's were read."""

BOUNDED: Final = ("drop", "bound")
"""Policies that need a bound; on the others it has no effect."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a gradient."""

    takes: bool = True
    """Whether it is applied; else its shards are handed out again."""
    factor: float = 1.0
    """What it is multiplied by."""
    lr_divisor: float = 1.0
    """What the learning rate of its update is divided by."""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """What is done about the staleness of gradients.

    | policy | a gradient of staleness s | source |
    |---|---|---|
    | accept | is applied as it is | Dean et al. 2012, section 4.1 |
    | drop | is thrown away where s > bound; its shards are handed out again | |
    | scale | is multiplied by 1 / (1 + s): not for Adam, which takes scale out again | |
    | lr | is applied at the learning rate divided by max(1, s) | Zhang et al. 2015, arXiv:1511.05950, equation 5 |
    | bound | is applied; a worker more than bound updates ahead of the slowest waits | Ho et al. 2013, section 2 |

    Example:
        >>> Staleness(policy="scale").decide(3).factor, Staleness(policy="lr").decide(3).lr_divisor
        (0.25, 3.0)
        >>> Staleness(policy="drop", bound=2).decide(3).takes
        False
    """

    policy: Annotated[Policy, maths(neutral="accept")] = "accept"
    """`accept`, `drop` above the bound, `scale` by 1/(1+s), `lr` divided by s, or `bound`: who is ahead waits."""
    bound: Annotated[int | None, maths(neutral=None), at_least(0)] = None
    """Updates; for `drop` and `bound`."""

    def problems(self) -> list[Problem]:
        """A policy without its bound, and a bound without a policy that reads it."""
        key = "strategy.staleness.bound"
        if self.policy in BOUNDED and self.bound is None:
            rule = f"is needed by strategy.staleness.policy={self.policy}. Give a number of updates."
            return [Problem(key=key, value=None, rule=rule)]
        if self.policy not in BOUNDED and self.bound is not None:
            rule = f"has no effect with strategy.staleness.policy={self.policy}. Use drop or bound, or leave it out."
            return [Problem(key=key, value=self.bound, rule=rule)]
        return []

    def decide(self, staleness: int) -> Decision:
        """What becomes of a gradient whose variables have seen so many updates since they were read."""
        return _JUDGES[self.policy](staleness, self.bound or 0)

    def may_begin(self, clock: int, slowest: int) -> bool:
        """Whether a worker may go on.

        Args:
            clock: its updates.
            slowest: those of the worker that has fewest.
        """
        return self.policy != "bound" or clock - slowest <= (self.bound or 0)


def staleness_summary(counts: Mapping[int, int]) -> dict[str, Any]:
    """The staleness of the updates of a run, as result.json says it.

    Args:
        counts: staleness -> updates.

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


_JUDGES: Final[Mapping[str, Callable[[int, int], Decision]]] = {
    "accept": lambda _staleness, _bound: Decision(),
    "drop": lambda staleness, bound: Decision(takes=staleness <= bound),
    "scale": lambda staleness, _bound: Decision(factor=1.0 / (1 + staleness)),
    "lr": lambda staleness, _bound: Decision(lr_divisor=float(max(1, staleness))),
    "bound": lambda _staleness, _bound: Decision(),
}
