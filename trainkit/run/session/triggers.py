"""When something is done beside training: each so many steps or epochs."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainkit.strategies.base import Strategy
from trainkit.trainer.loop import Trigger

__all__ = ["at_sync_points", "every_n_steps", "every_steps_or_epochs"]


def every_n_steps(steps: int) -> Callable[[int], int]:
    """The next step after a given one, each so many.

    Example:
        >>> every_n_steps(5)(0), every_n_steps(5)(5), every_n_steps(5)(7)
        (5, 10, 10)
    """
    return lambda step: (step // steps + 1) * steps


def every_steps_or_epochs(
    every_steps: int | None, every_epochs: float | None, per_epoch: int
) -> list[Callable[[int], int]]:
    """The next step after a given one, by steps, by epochs of so many steps, or by both.

    Example:
        >>> [next_after(5) for next_after in every_steps_or_epochs(4, 0.5, per_epoch=6)]
        [8, 6]
    """
    found = []
    if every_steps is not None:
        found.append(every_n_steps(every_steps))
    if every_epochs is not None:
        length = every_epochs * per_epoch
        found.append(lambda step: max(step + 1, math.ceil((math.floor(step / length + 1e-9) + 1) * length - 1e-9)))
    return found


def at_sync_points(occasion: Trigger, strategy: Strategy) -> Trigger:
    """The occasion, after the next step at which replicas are alike."""
    plain = occasion.next_after
    return Trigger(act=occasion.act, next_after=lambda step: strategy.settles_at(plain(step)))
