"""Plan every legal way to train a config, rank the ways, and explain why the others are not the best.

A way is a strategy, a number of devices and a precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import Any, Final, Literal, get_args

from trainkit.config.composition import Composition
from trainkit.errors import ConfigError
from trainkit.files import num_bytes
from trainkit.run.estimates.hardware import Hardware
from trainkit.run.estimates.memory import verdict_of
from trainkit.run.estimates.outlook import outlook_of
from trainkit.run.estimates.passes import evaluated_samples
from trainkit.run.planning.misfits import num_tried, refuse_misfits
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.base import Strategy
from trainkit.strategies.shipped import shipped_strategies
from trainkit.trained.build import meta_model

NOT_TRIED: Final = (
    "central_storage, parameter_server, local_sgd and device_map are not tried: they are for parameter servers, slow "
    "links and models that one process splits over devices (docs/plan.md#which-strategy)."
)
"""Why other strategies are absent."""


_FEW: Final = 8
_MOST_COUNTS: Final = 3


@cache
def _strategies() -> Mapping[str, type[Strategy]]:
    """Return the strategies to try, the simplest first."""
    return {entry.name: entry.kind for entry in shipped_strategies() if entry.kind.spread_over(1) is not None}


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
        position = list(_strategies()).index(self.strategy) if self.strategy else 0
        return self.devices, position, bool(self.precision)


Family = tuple[Way, ...]
"""Ways of one strategy and precision, the fewest devices first."""


def families(*, devices: int, strategy_given: bool, precisions: tuple[str, ...]) -> Iterator[Family]:
    """Yield the ways, the simplest family first.

    Args:
        devices: the most devices.
        strategy_given: whether the user has chosen the strategy, which then stays.
        precisions: choices of `precision` to try beside that of the config.

    Example:
        >>> ways = list(families(devices=4, strategy_given=False, precisions=()))
        >>> [" ".join(way.overrides) for way in ways[1]]
        ['strategy=mirrored strategy.replicas=2', 'strategy=mirrored strategy.replicas=4']
    """
    for precision, name in product(("", *precisions), ("",) if strategy_given else _strategies()):
        added = (f"precision={precision}",) if precision else ()
        if strategy_given:
            yield (Way(strategy="", devices=0, precision=precision, overrides=added),)
            continue
        counts = _counts(devices) if _strategies()[name].spread_over(1) else [1]
        ways = tuple(
            Way(strategy=name, devices=count, precision=precision, overrides=(*_overrides(name, count), *added))
            for count in counts
        )
        if ways:
            yield ways


def _overrides(name: str, count: int) -> tuple[str, ...]:
    """Return the overrides of a strategy on `count` devices."""
    keys = _strategies()[name].spread_over(count) or {}
    return f"strategy={name}", *(f"strategy.{key}={value}" for key, value in keys.items())


def _counts(devices: int) -> list[int]:
    """Return at most three numbers of devices: the largest, then halves of it (quarters if it is large).

    Example:
        >>> _counts(8), _counts(64), _counts(6), _counts(1)
        ([2, 4, 8], [4, 16, 64], [3, 6], [])
    """
    factor = 2 if devices <= _FEW else 4
    counts: list[int] = []
    while devices > 1 and len(counts) < _MOST_COUNTS:
        counts.insert(0, devices)
        devices //= factor
    return counts


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
class TriedWay:
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
    ranking: tuple[TriedWay, ...]
    """Ways that can be chosen, the best first."""
    others: tuple[TriedWay, ...]
    """Ways that cannot."""

    @property
    def best(self) -> TriedWay | None:
        """The best way; None if there is none."""
        return self.ranking[0] if self.ranking else None

    def reason(self, tried: TriedWay) -> str:
        """Return why a way is not the best one; for the best one, why it is."""
        if tried.figures is None:
            return f"refused: {tried.refused}"
        if tried.figures.fits is None or tried.figures.step_s is None:
            return f"not known: {tried.figures.unknown}"
        if not tried.figures.fits:
            return f"does not fit: needs {num_bytes(tried.figures.needs)}, has {num_bytes(tried.figures.has)}"
        return self._compared(tried)

    def _compared(self, tried: TriedWay) -> str:
        if tried is self.best:
            return f"the {_BEST_TEXTS[self.goal]}"
        best = self.ranking[0]
        ratio = metric(tried, self.goal) / metric(best, self.goal)
        if ratio > NEAR:
            return f"{round(ratio) if ratio >= 10 else round(ratio, 1):,} times {_RATIO_TEXTS[self.goal]}"
        harder = "a more complex strategy" if tried.way.strategy != best.way.strategy else "in another precision"
        harder = harder if tried.way.devices == best.way.devices else f"on {tried.way.devices} devices"
        return f"{_NEAR_TEXTS[self.goal]} within {NEAR - 1:.0%}, and {harder}"


_BEST_TEXTS: Final[Mapping[Goal, str]] = {
    "time": "shortest step",
    "cost": "fewest device seconds a step",
    "memory": "least memory a device",
}
_NEAR_TEXTS: Final[Mapping[Goal, str]] = {"time": "as fast", "cost": "as cheap", "memory": "as little memory"}
_RATIO_TEXTS: Final[Mapping[Goal, str]] = {"time": "the time", "cost": "the device seconds", "memory": "the memory"}


def metric(tried: TriedWay, goal: Goal) -> float:
    """Return the figure by which a way is ranked; smaller is better."""
    figures = tried.figures
    if figures is None or figures.step_s is None:
        return float("inf")
    values = {"time": figures.step_s, "cost": figures.step_s * figures.devices, "memory": float(figures.needs)}
    return values[goal]


def advise(tried: Sequence[TriedWay], goal: Goal) -> Advice:
    """Rank ways for a goal.

    Each place goes to the simplest of the ways that are within `NEAR` of the best that is left.

    Example:
        >>> def tried(devices: int, step_s: float) -> TriedWay:
        ...     figures = Figures(needs=1, has=2, fits=True, step_s=step_s, devices=devices)
        ...     name = "mirrored" if devices > 1 else "one_device"
        ...     way = Way(strategy=name, devices=devices, precision="", overrides=())
        ...     return TriedWay(way=way, overrides=(), figures=figures)
        >>> advice = advise([tried(1, 1.0), tried(8, 0.98)], "time")
        >>> advice.best.way.devices, advice.reason(advice.ranking[1])
        (1, 'as fast within 10%, and on 8 devices')
    """
    legal = [item for item in tried if item.is_legal]
    ranking = []
    while legal:
        least = min(metric(item, goal) for item in legal)
        chosen = min((item for item in legal if metric(item, goal) <= least * NEAR), key=lambda item: item.way.order)
        ranking.append(chosen)
        legal = [item for item in legal if item is not chosen]
    return Advice(goal=goal, ranking=tuple(ranking), others=tuple(item for item in tried if not item.is_legal))


Planned = Callable[[Sequence[str]], Figures]
"""Function that plans the config with additional overrides. Raises ConfigError."""


def try_way(way: Way, planned: Planned, *, savers: Iterable[tuple[str, ...]], goal: Goal) -> TriedWay:
    """Plan a way; if it does not fit, add one memory-saving override after another until it does.

    For the goal `memory`, the first of them is tried even if the way fits.

    Args:
        way: the way.
        planned: plans the config with overrides.
        savers: memory-saving overrides, the cheapest first.
        goal: the goal by which ways are ranked.
    """
    try:
        best = TriedWay(way=way, overrides=way.overrides, figures=planned(way.overrides))
    except ConfigError as error:
        return TriedWay(way=way, overrides=way.overrides, refused=str(error.problems[0]))
    for number, saver in enumerate(savers):
        fits = best.figures is not None and best.figures.fits is not False
        if fits and (goal != "memory" or number):
            break
        overrides = (*way.overrides, *saver)
        try:
            other = TriedWay(way=way, overrides=overrides, figures=planned(overrides))
        except ConfigError:
            continue
        if metric(other, "memory") < metric(best, "memory"):
            best = other
    return best


def try_family(family: Iterable[Way], attempt: Callable[[Way], TriedWay], goal: Goal) -> list[TriedWay]:
    """Try the ways of one strategy and precision on several numbers of devices, as long as the figures can improve.

    With fewer devices, each holds more; more devices never need fewer device seconds. So `memory` starts with the most
    devices and `cost` with the fewest, until a way fits. `time` removes devices as long as that does not make a step
    longer.
    """
    results: list[TriedWay] = []
    least = float("inf")
    for way in family if goal == "cost" else reversed(tuple(family)):
        results.append(tried := attempt(way))
        if tried.figures is None or (goal == "cost" and not tried.is_legal):
            continue  # another number of devices may be legal; more devices may hold the run
        if goal != "time" or not tried.is_legal or metric(tried, goal) > least * NEAR:
            break
        least = min(least, metric(tried, goal))
    return results


_SMALLER: Final = (2, 8, 32)
"""Divisors of the size of a shard to try if a run does not fit into memory."""


@dataclass(kw_only=True)
class Planner:
    """Plans one config in several ways; the splits of its data are created once for all of them."""

    compose: Callable[[Sequence[str]], Composition]
    """Composes and checks the config with additional overrides. Raises ConfigError."""
    hardware: Hardware
    devices: int
    """Largest number of devices."""
    splits: Mapping[str, Any] | None = None
    """The splits that the class of the data declares; None: the dataset is opened to find out."""
    knows_length: bool = True
    """Whether the length of the training split is known; the cost to the end needs it."""
    _fitting: set[tuple[str, int]] = field(default_factory=set, init=False)
    """The trials of a few samples that found no misfit, each by its precision and samples: ways change nothing else of
    the model, the data and the objective.
    """

    def families(self, base: Composition) -> list[Family]:
        """Return the ways to try; choices of the user stay."""
        is_full = base.cfg.precision.get("value") in {"fp32", "tf32"} and not base.is_given("precision")
        precisions = ("bf16_mixed",) if is_full and "bf16" in self.hardware.tflops else ()
        return list(families(devices=self.devices, strategy_given=base.is_given("strategy"), precisions=precisions))

    def try_way(self, way: Way, base: Composition, goal: Goal) -> TriedWay:
        """Plan a way; if it does not fit, with overrides that save memory."""
        savers = [] if base.is_given("activation_checkpointing") else [("activation_checkpointing=full",)]
        is_cut = base.is_given("batch.micro_size") or base.is_given("batch.accumulation")
        smaller = self._smaller(way, shards=not is_cut, evaluations=not base.is_given("eval.batch_size"))
        last = savers[-1] if savers else ()
        return try_way(way, self.figures, savers=chain(savers, ((*last, *sizes) for sizes in smaller)), goal=goal)

    def figures(self, overrides: Sequence[str]) -> Figures:
        """Return the figures of the plan with these overrides.

        Raises:
            ConfigError: its problems.
        """
        plan = self._planned(overrides)
        model = meta_model(plan.cfg)
        trial = plan.components.precision.value, num_tried(plan)
        if trial not in self._fitting:
            refuse_misfits(plan, model)
            self._fitting.add(trial)
        model_notes(plan, model)  # raises for a model that the strategy or the precision refuses
        plan = plan.resolved(lambda: model)
        outlook = outlook_of(plan, model, ends=self.knows_length or plan.cfg.steps is not None)
        verdict = verdict_of(plan, outlook.memory, self.hardware)
        result = Figures(
            needs=verdict.needs,
            has=verdict.has,
            fits=verdict.fits,
            step_s=None if outlook.time is None else outlook.time.step_s,
            devices=plan.num_computing if outlook.work is None else outlook.work.num_devices,
            cost_usd=outlook.cost_usd,
        )
        if outlook.traffic is None:
            return replace(result, step_s=None, unknown="the exchange between its ranks, and therefore its time")
        return result

    def _planned(self, overrides: Sequence[str]) -> RunPlan:
        composition = self.compose(overrides)
        try:
            plan = make_plan(composition.cfg, num_gpus=self.num_gpus, splits=self.splits)
        except ConfigError as error:
            raise composition.with_origins(error) from error
        self.splits = plan.components.datasets
        return plan

    @property
    def num_gpus(self) -> int:
        """GPUs that are planned for; 0 where the hardware is a host without any."""
        return 0 if self.hardware.whole_host else self.devices

    def _smaller(self, way: Way, *, shards: bool, evaluations: bool) -> Iterator[tuple[str, ...]]:
        """Yield overrides for smaller batches of an evaluation, then also for smaller shards than those of a way;
        planning starts with the first `next()`.
        """
        try:
            plan = self._planned(way.overrides)
        except ConfigError:
            return
        size, evaluated = plan.batch.micro_size, evaluated_samples(plan) if evaluations else 0
        for smaller in dict.fromkeys((size, *(max(size // divisor, 1) for divisor in _SMALLER if shards))):
            fewer = (f"eval.batch_size={smaller}",) if smaller < evaluated else ()
            sizes = (*((f"batch.micro_size={smaller}",) if smaller < size else ()), *fewer)
            if sizes:
                yield sizes
