"""The steps after which something is due: by steps, by epochs, and only where replicas are equal."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainkit.trainer.loop import Trigger


def every_n_steps(steps: int) -> Callable[[int], int]:
    """Return a function from a step to the next multiple of `steps`.

    Example:
        >>> every_n_steps(5)(0), every_n_steps(5)(5), every_n_steps(5)(7)
        (5, 10, 10)
    """
    return lambda step: (step // steps + 1) * steps


def every_steps_or_epochs(
    every_steps: int | None, every_epochs: float | None, per_epoch: int
) -> list[Callable[[int], int]]:
    """Return functions from a step to the next one to act at: by steps, by epochs of `per_epoch` steps, or by both.

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


def at_sync_points(trigger: Trigger, next_sync_step: Callable[[int], int]) -> Trigger:
    """Return the trigger delayed to the next step at which replicas hold identical parameters."""
    next_after = trigger.next_after
    return Trigger(act=trigger.act, next_after=lambda step: next_sync_step(next_after(step)))
