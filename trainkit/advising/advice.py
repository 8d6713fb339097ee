"""Plan every legal way to train a config, rank the ways, and explain why the others are not the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainkit.advising.ways import Way
from trainkit.errors import ConfigError
from trainkit.storage import num_bytes

Goal = Literal["time", "cost", "memory"]
GOALS: Final[tuple[Goal, ...]] = get_args(Goal)
"""Values of `--for`: the shortest step, the fewest device seconds a step, the least memory a device."""
NEAR: Final = 1.1
"""Times within this factor count as equal, because the plan gives bands; the simplest of such ways is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures from the plan of a way."""

    needs: int
    """Bytes that the device with the largest share needs."""
    has: int
    """Bytes of memory of that device."""
    fits: bool | None
    """Whether the run fits into memory; None if the memory of the activations is unknown."""
    step_s: float | None
    """Seconds of a step, the middle of the plan's band; None if unknown."""
    devices: int
    """Number of devices that train."""
    unknown: str = "its activations, and therefore its memory and time"
    """The quantities that the plan cannot estimate, if `fits` or `step_s` is None."""
    cost_usd: float | None = None
    """US dollars to the end of the training; None without a price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One way and its figures, or the reason why it is refused."""

    way: Way
    overrides: tuple[str, ...]
    """Arguments to add to the command line, including the arguments that make the run fit into memory."""
    figures: Figures | None = None
    """Figures of the plan; None if the way is refused."""
    refused: str | None = None
    """The first problem of its plan."""

    @property
    def is_legal(self) -> bool:
        """Whether the way can be chosen: its plan has no problem, and the run fits."""
        return self.figures is not None and self.figures.fits is True and self.figures.step_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The ways, ranked for a goal."""

    goal: Goal
    ranking: tuple[Tried, ...]
    """Ways that can be chosen, the best first."""
    others: tuple[Tried, ...]
    """Ways that cannot."""

    @property
    def best(self) -> Tried | None:
        """The best way; None if there is none."""
        return self.ranking[0] if self.ranking else None

    def reason(self, tried: Tried) -> str:
        """Return why a way is not the best one; for the best one, why it is."""
        if tried.figures is None:
            return f"refused: {tried.refused}"
        if tried.figures.fits is None or tried.figures.step_s is None:
            return f"not known: {tried.figures.unknown}"
        if not tried.figures.fits:
            return f"does not fit: needs {num_bytes(tried.figures.needs)}, has {num_bytes(tried.figures.has)}"
        return self._compared(tried)

    def _compared(self, tried: Tried) -> str:
        if tried is self.best:
            return f"the {_MOST[self.goal]}"
        best = self.ranking[0]
        ratio = metric(tried, self.goal) / metric(best, self.goal)
        if ratio <= NEAR:
            return f"{_AS[self.goal]} within {NEAR - 1:.0%}, and {_harder(tried.way, best.way)}"
        return f"{ratio:.2g} times {_OF[self.goal]}"


_MOST: Final[Mapping[Goal, str]] = {
    "time": "shortest step",
    "cost": "fewest device seconds a step",
    "memory": "least memory a device",
}
_AS: Final[Mapping[Goal, str]] = {"time": "as fast", "cost": "as cheap", "memory": "as little memory"}
_OF: Final[Mapping[Goal, str]] = {"time": "the time", "cost": "the device seconds", "memory": "the memory"}


def _harder(way: Way, best: Way) -> str:
    if way.devices != best.devices:
        return f"on {way.devices} devices"
    return "a more complex strategy" if way.strategy != best.strategy else "in another precision"


def metric(tried: Tried, goal: Goal) -> float:
    """Return the figure by which a way is ranked; smaller is better."""
    figures = tried.figures
    if figures is None or figures.step_s is None:
        return float("inf")
    values = {"time": figures.step_s, "cost": figures.step_s * figures.devices, "memory": float(figures.needs)}
    return values[goal]


def advise(tried: Sequence[Tried], goal: Goal) -> Advice:
    """Rank ways for a goal.

    Each place goes to the simplest of the ways that are within `NEAR` of the best that is left.

    Example:
        >>> def one(devices: int, step_s: float) -> Tried:
        ...     figures = Figures(needs=1, has=2, fits=True, step_s=step_s, devices=devices)
        ...     name = "mirrored" if devices > 1 else "one_device"
        ...     way = Way(strategy=name, devices=devices, precision="", overrides=())
        ...     return Tried(way=way, overrides=(), figures=figures)
        >>> found = advise([one(1, 1.0), one(8, 0.98)], "time")
        >>> found.best.way.devices, found.reason(found.ranking[1])
        (1, 'as fast within 10%, and on 8 devices')
    """
    left = [one for one in tried if one.is_legal]
    ranking = []
    while left:
        least = min(metric(one, goal) for one in left)
        chosen = min((one for one in left if metric(one, goal) <= least * NEAR), key=lambda one: one.way.order)
        ranking.append(chosen)
        left = [one for one in left if one is not chosen]
    return Advice(goal=goal, ranking=tuple(ranking), others=tuple(one for one in tried if not one.is_legal))


Planned = Callable[[Sequence[str]], Figures]
"""Function that plans the config with additional overrides. Raises ConfigError."""


def try_way(way: Way, planned: Planned, *, savers: Iterable[tuple[str, ...]], goal: Goal) -> Tried:
    """Plan a way; if it does not fit, add one memory-saving override after another until it does.

    For the goal `memory`, the first of them is tried even if the way fits.

    Args:
        way: the way.
        planned: plans the config with overrides.
        savers: memory-saving overrides, the cheapest first.
        goal: the goal by which ways are ranked.
    """
    try:
        best = Tried(way=way, overrides=way.overrides, figures=planned(way.overrides))
    except ConfigError as error:
        return Tried(way=way, overrides=way.overrides, refused=str(error.problems[0]))
    for number, saver in enumerate(savers):
        fits = best.figures is not None and best.figures.fits is not False
        if fits and (goal != "memory" or number):
            break
        overrides = (*way.overrides, *saver)
        try:
            other = Tried(way=way, overrides=overrides, figures=planned(overrides))
        except ConfigError:
            continue
        if metric(other, "memory") < metric(best, "memory"):
            best = other
    return best


def try_family(family: Iterable[Way], attempt: Callable[[Way], Tried], goal: Goal) -> list[Tried]:
    """Try the ways of one strategy and precision on several numbers of devices, as long as the figures can improve.

    With fewer devices, each holds more; more devices never need fewer device seconds. So `memory` starts with the most
    devices and `cost` with the fewest, until a way fits. `time` removes devices as long as that does not make a step
    longer.
    """
    found: list[Tried] = []
    least = float("inf")
    for way in family if goal == "cost" else reversed(tuple(family)):
        found.append(one := attempt(way))
        if one.figures is None or (goal == "cost" and not one.is_legal):
            continue  # another number of devices may be legal; more devices may hold the run
        if goal != "time" or not one.is_legal or metric(one, goal) > least * NEAR:
            break
        least = min(least, metric(one, goal))
    return found
