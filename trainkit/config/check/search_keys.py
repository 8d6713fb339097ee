"""Keys of `sweep` that the chosen sweeper does not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["unused_search_keys"]

_READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "trials": ("random", "optuna", "halving"),
    "seed": ("random", "optuna", "halving"),
    "pruner": ("optuna",),
    "min_steps": ("optuna",),
    "reduction": ("halving", "optuna"),
    "rungs": ("halving",),
}
"""Key of `sweep` -> the choices of hydra/sweeper that read it."""


def unused_search_keys(sweep: Mapping[str, Any], *, sweeper: str, multirun: bool) -> Iterator[tuple[str, str]]:
    """Yield the keys of a search that have no effect with this sweeper, and why.

    Args:
        sweep: the values below `sweep`.
        sweeper: the choice of hydra/sweeper.
        multirun: whether the command is a sweep.

    Example:
        >>> dict(unused_search_keys({}, sweeper="random", multirun=True))["sweep.rungs"]
        'has no effect with hydra/sweeper=random: it is for halving.'
    """
    for name, readers in _READERS.items():
        if not multirun:
            yield f"sweep.{name}", "has no effect without -m."
        elif sweeper not in readers:
            yield f"sweep.{name}", f"has no effect with hydra/sweeper={sweeper}: it is for {', '.join(readers)}."
    if not multirun or sweeper not in ("optuna", "halving"):
        return
    pruner = sweep.get("pruner")
    if sweeper == "optuna" and pruner != "hyperband":
        yield "sweep.reduction", "has no effect without sweep.pruner=hyperband."
    if sweeper == "optuna" and pruner == "none":
        yield "sweep.min_steps", "has no effect with sweep.pruner=none: every job takes all its steps."
    if sweeper == "halving" and sweep.get("trials") is None:
        yield "sweep.seed", "has no effect without sweep.trials: the whole grid is tried."
