"""Plan a config with other overrides, and take the figures of the plan that advice needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

from trainkit.advising.advice import Figures, Goal, Tried, try_way
from trainkit.advising.ways import Family, Way, families
from trainkit.config.composition import Composition
from trainkit.errors import ConfigError
from trainkit.run.estimates.hardware import Hardware
from trainkit.run.estimates.outlook import outlook_of
from trainkit.run.estimates.passes import evaluated_samples
from trainkit.run.estimates.verdict import verdict_of
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.misfits import num_tried, refuse_misfits
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan

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
        return list(
            families(
                devices=self.devices,
                strategy_given=base.is_given("strategy"),
                precisions=() if base.is_given("precision") else self._precisions(base),
            )
        )

    def try_way(self, way: Way, base: Composition, goal: Goal) -> Tried:
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
        model = meta_model(plan)
        tried = plan.components.precision.value, num_tried(plan)
        if tried not in self._fitting:
            refuse_misfits(plan, model)
            self._fitting.add(tried)
        model_notes(plan, model)  # raises for a model that the strategy or the precision refuses
        plan = plan.resolved(lambda: model)
        outlook = outlook_of(plan, model, ends=self.knows_length or plan.cfg.steps is not None)
        verdict = verdict_of(plan, outlook.memory, self.hardware)
        found = Figures(
            needs=verdict.needs,
            has=verdict.has,
            fits=verdict.fits,
            step_s=None if outlook.time is None else outlook.time.step_s,
            devices=plan.num_computing if outlook.work is None else outlook.work.num_devices,
            cost_usd=outlook.cost_usd,
        )
        if outlook.traffic is None:
            return replace(found, step_s=None, unknown="the exchange between its ranks, and therefore its time")
        return found

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
        for one in dict.fromkeys((size, *(max(size // divisor, 1) for divisor in _SMALLER if shards))):
            fewer = (f"eval.batch_size={one}",) if one < evaluated else ()
            sizes = (*((f"batch.micro_size={one}",) if one < size else ()), *fewer)
            if sizes:
                yield sizes

    def _precisions(self, base: Composition) -> tuple[str, ...]:
        is_full = base.cfg.precision.get("value") in {"fp32", "tf32"}
        return ("bf16_mixed",) if is_full and "bf16" in self.hardware.tflops else ()
