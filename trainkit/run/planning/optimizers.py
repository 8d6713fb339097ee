"""The learning rate of a run, and its several optimizers (`optimizers`): parameters, rate and phase of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from trainkit.config.optimizers import optimizer_node, passes_of
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import class_built_by
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.schedules import LearningRate, NeedsRun, Schedule, scale_lr
from trainkit.objectives.base import Objective
from trainkit.run.planning.build import build_schedule, make_optimizer, parameter_matches
from trainkit.strategies.base import NamedOptimizer, Phase, PlanContext, Strategy, choice_of
from trainkit.strategies.shipped import names_of


@dataclass(frozen=True, kw_only=True)
class PlannedOptimizer:
    """One of several optimizers, with all values resolved."""

    name: str
    node: Mapping[str, Any]
    """The complete node of the optimizer."""
    match: tuple[str, ...]
    """Patterns of its parameters; empty: the parameters of no other optimizer."""
    rate: LearningRate
    """Learning rate of the optimizer at every step."""
    phase: Phase
    """Schedule of the phase with its name."""

    @property
    def kind(self) -> type | None:
        """Class of the optimizer; None if its target is a function."""
        return class_built_by(self.node)

    @property
    def text(self) -> str:
        """Name, class and ratio, for the summary."""
        phase = self.phase
        ratio = f", in one of {phase.every} steps" if phase.every > 1 else ""
        ratio += f", {phase.repeats} times a step" if phase.repeats > 1 else ""
        return f"{self.name} ({self.node[TARGET].rpartition('.')[2]}{ratio})"


def learning_rate_of(cfg: RunConfig, batch: BatchPlan, num_steps: int, base: float, schedule: Schedule) -> LearningRate:
    """Return the learning rate of every step, from the base rate of an optimizer and a schedule."""
    peak = scale_lr(
        base,
        global_size=batch.global_size,
        reference_size=cfg.lr_scaling.reference_batch,
        rule=cfg.lr_scaling.rule,
    )
    epochs = cfg.warmup.epochs
    warmup = (cfg.warmup.steps or 0) if epochs is None else round(epochs * batch.steps_per_epoch)
    start = base if cfg.warmup.start == "base" else 0.0
    if isinstance(schedule, NeedsRun):
        schedule = schedule.placed(
            base=base, warmup_steps=warmup, num_steps=num_steps, steps_per_epoch=batch.steps_per_epoch
        )
    return LearningRate(base=base, peak=peak, start=start, warmup_steps=warmup, num_steps=num_steps, schedule=schedule)


def num_steps_of(cfg: RunConfig, batch: BatchPlan) -> int:
    """Return the updates of the whole training."""
    return cfg.steps or max(1, round((cfg.epochs or 1) * batch.steps_per_epoch))


def rates_of(cfg: RunConfig, batch: BatchPlan, schedule: Schedule) -> tuple[LearningRate, tuple[PlannedOptimizer, ...]]:
    """Return the learning rate of every step (of the first of several optimizers), and the several optimizers.

    Raises:
        ConfigError: a schedule cannot be built.
    """
    rate_of = partial(learning_rate_of, cfg, batch, num_steps_of(cfg, batch))
    optimizers = planned_optimizers(cfg, schedule, rate_of) if cfg.optimizers else ()
    return optimizers[0].rate if optimizers else rate_of(float(cfg.optimizer["lr"]), schedule), optimizers


def planned_optimizers(
    cfg: RunConfig, schedule: Schedule, rate_of: Callable[[float, Schedule], LearningRate]
) -> tuple[PlannedOptimizer, ...]:
    """Return the optimizers of `optimizers`, in its order.

    Args:
        cfg: a checked config.
        schedule: that of the run, for entries without their own.
        rate_of: returns the learning rate of every step from a base rate and a schedule.

    Raises:
        ConfigError: the schedule of an entry cannot be built.
    """
    found = []
    for name, entry in cfg.optimizers.items():
        node = optimizer_node(cfg.optimizer, entry)
        repeats, every = passes_of(entry.get("ratio", 1)) or (1, 1)
        own = entry.get("schedule")
        found.append(
            PlannedOptimizer(
                name=name,
                node=node,
                match=tuple(entry.get("match") or ()),
                rate=rate_of(float(node["lr"]), schedule if own is None else _schedule(own, name)),
                phase=Phase(name=name, repeats=repeats, every=every),
            )
        )
    return tuple(found)


def _schedule(node: Mapping[str, Any], name: str) -> Schedule:
    try:
        schedule = build_schedule(node)
    except ConfigError as error:
        raise ConfigError([replace(one, key=f"optimizers.{name}.{one.key}") for one in error.problems]) from error
    return schedule


def phase_problems(optimizers: Sequence[PlannedOptimizer], objective: Objective) -> list[Problem]:
    """Return phases without an optimizer, optimizers without a phase, and ratios without effect."""
    kind, names, phases = type(objective).__name__, [one.name for one in optimizers], objective.phases
    if not phases:
        rule = f"has no effect: {kind} names no phases, and all optimizers step together."
        return [
            Problem(key=f"optimizers.{one.name}.ratio", rule=rule)
            for one in optimizers
            if (one.phase.repeats, one.phase.every) != (1, 1)
        ]
    listed = ", ".join(phases)
    if not names:
        rule = f"{kind} has the phases {listed}. Give each an optimizer, {phases[0]}: {{match: ['{phases[0]}.*']}}."
        return [Problem(key="optimizers", rule=rule)]
    found = [
        Problem(key=f"optimizers.{name}", rule=f"{kind} has no such phase. There are: {listed}.")
        for name in names
        if name not in phases
    ]
    found += [
        Problem(key="optimizers", rule=f"has no {name}, which is a phase of {kind}. Give it an optimizer.")
        for name in phases
        if name not in names
    ]
    if not found and all(one.phase.every > 1 for one in optimizers):
        rule = "every phase skips steps, and some steps would have no phase. Give one of them a ratio of 1 or more."
        found.append(Problem(key="optimizers", rule=rule))
    return found


def strategy_problems(strategy: Strategy, context: PlanContext) -> list[Problem]:
    """Return the problem of a run with several optimizers under a strategy that supports one."""
    if strategy.facts.several_optimizers:
        return []
    rule = (
        f"names {', '.join(context.optimizers)}, and {choice_of(type(strategy))} updates all parameters by one "
        f"optimizer. Use strategy={names_of(lambda kind: kind.facts.several_optimizers)}."
    )
    return [Problem(key="optimizers", rule=rule)]


def assigned_parameters(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> dict[str, list[str]]:
    """Return the trainable parameters that each optimizer takes by its patterns, the rest with the one without."""
    takes = parameter_matches(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    found = {one.name: [name for name in trained if takes(name, one.match)] for one in optimizers}
    taken = {name for names in found.values() for name in names}
    for one in optimizers:
        if not one.match:
            found[one.name] = [name for name in trained if name not in taken]
    return found


def assignment_problems(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> list[Problem]:
    """Return patterns that match nothing, and parameters of no optimizer or of two."""
    found = list(_pattern_problems(model, optimizers))
    assigned, owner = assigned_parameters(model, optimizers), dict[str, str]()
    for optimizer, names in assigned.items():
        twice = [name for name in names if name in owner]
        if twice:
            rule = f"takes {_some(twice)}, which optimizers.{owner[twice[0]]} takes, too. Each needs one optimizer."
            found.append(Problem(key=f"optimizers.{optimizer}.match", rule=rule))
        if not names and not found:
            rule = "takes no parameter: the others take all. Leave it out, or narrow their patterns."
            found.append(Problem(key=f"optimizers.{optimizer}", rule=rule))
        owner.update(dict.fromkeys(names, optimizer))
    rest = [name for name, param in model.named_parameters() if param.requires_grad and name not in owner]
    if rest and not found:
        rule = f"no optimizer takes {_some(rest)}. Leave the match of one optimizer out, or freeze them."
        found.append(Problem(key="optimizers", rule=rule))
    return found


def _pattern_problems(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> Iterator[Problem]:
    takes, params = parameter_matches(model), dict(model.named_parameters())
    for one in optimizers:
        for pattern in one.match:
            names = [name for name in params if takes(name, (pattern,))]
            if not names:
                rule = f"matches no parameter of the model, which has {_some(list(params))}."
            elif not any(params[name].requires_grad for name in names):
                rule = f"matches only frozen parameters: {_some(names)}."
            else:
                continue
            yield Problem(key=f"optimizers.{one.name}.match", value=pattern, rule=rule)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def optimizer_notes(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> list[str]:
    """Return a line for each optimizer: the parameters that it updates."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return [
        f"optimizers.{optimizer} updates {sum(sizes[name] for name in names):,} parameters: {_some(names)}"
        for optimizer, names in assigned_parameters(model, optimizers).items()
    ]


def named_optimizers(
    cfg: RunConfig,
    optimizers: Sequence[PlannedOptimizer],
    model: nn.Module,
    replaced: Mapping[str, object] | None = None,
) -> tuple[NamedOptimizer, ...]:
    """Return the input from which a strategy builds the optimizers.

    Args:
        cfg: the config.
        optimizers: result of `planned_optimizers`.
        model: the model, before a strategy changes it.
        replaced: settings that replace those of the config, if an optimizer has them.
    """
    assigned = assigned_parameters(model, optimizers)
    return tuple(
        NamedOptimizer(
            name=one.name,
            params=frozenset(assigned[one.name]),
            make=make_optimizer(replace(cfg, optimizer={**one.node, **_of_class(one.node, replaced or {})}), model),
            factor=one.rate.factor,
        )
        for one in optimizers
    )


def _of_class(node: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key in node}
