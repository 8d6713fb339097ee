"""Build the components of a training from the nodes of a config, before anything is placed on devices: model, data,
objective, callbacks, learning rate, and one optimizer or several (`optimizers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.adapters.average import Average
from trainkit.adapters.float8 import Float8
from trainkit.callbacks.every_run import FinalSummary, MetricsFile, StartupSummary
from trainkit.cluster.tasks import Task
from trainkit.config.optimizers import optimizer_node, passes_of
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import admitted, build, class_built_by, is_torch_scheduler
from trainkit.config.targets.kinds import PLACES
from trainkit.data.hooks import DataHooks
from trainkit.data.splits import build_splits, folded, read_sample
from trainkit.errors import ConfigError, Problem, listed
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision
from trainkit.numerics.schedules import LearningRate, NeedsRun, Schedule, TorchSchedule, scale_lr
from trainkit.objectives.base import Objective, Supervised
from trainkit.objectives.linear_cross_entropy import offered_by
from trainkit.strategies.base import LossWeighting, NamedOptimizer, Numerics, Phase, PlanContext, Strategy, choice_of
from trainkit.strategies.model_transforms import NO_TRANSFORMS, ModelTransforms, apply_transforms, format_for
from trainkit.strategies.shipped import names_of
from trainkit.trained.build import build_model, build_objective, build_without_data
from trainkit.trainer.events import Callback, Planned


@dataclass(frozen=True, kw_only=True)
class Components:
    """The objects of a training."""

    strategy: Strategy
    precision: Precision
    schedule: Schedule
    objective: Objective
    datasets: Mapping[str, Any]
    """Split -> dataset; `train` is always there."""
    numerics: Numerics
    hooks: DataHooks = field(default_factory=DataHooks)
    """The code that `data` names in addition to its class."""

    @cached_property
    def sample(self) -> Any:
        """One sample of the training data; None if the dataset cannot be indexed."""
        train = self.datasets["train"]
        if not hasattr(train, "__getitem__"):
            return None
        with Untouched(seed=0):
            return read_sample(train, 0)

    @cached_property
    def example(self) -> Any:
        """A sample, to look up its fields; with a collate, a batch that holds it twice."""
        if self.hooks.collate is None or self.sample is None:
            return self.sample
        with Untouched(seed=0):
            return self.hooks.collate([self.sample, self.sample], [0, 0])

    @property
    def selecting(self) -> Supervised | None:
        """The objective, if it selects its fields by name; None if it overrides `loss`."""
        objective = self.objective
        if isinstance(objective, Supervised) and type(objective).loss is Supervised.loss:
            return objective
        return None

    def planned(self, cfg: RunConfig) -> Planned:
        """Return the facts that callbacks may know before the run starts."""
        return Planned(
            key="callbacks",
            cfg=cfg,
            objective=self.objective,
            datasets=self.datasets,
            sample=self.sample,
            strategy_facts=self.strategy.facts_in(PlanContext()),
        )

    def refuse_unknown_fields(self) -> None:
        """Refuse an objective whose fields are not those of a sample, before anything starts.

        Raises:
            ConfigError: a field that the objective names does not exist.
            DataError: the fields of a sample are ambiguous.
        """
        if self.selecting is not None and self.example is not None:
            self.selecting.split_batch(self.example)

    @property
    def weighing(self) -> LossWeighting:
        """Normalisation of the loss, derived from one sample; where a collate may pad, by a constant weight, else by
        counting.
        """
        objective, per_sample = self.objective, None
        if self.hooks.collate is None:
            return LossWeighting.of(objective, self.sample)
        with suppress(Exception):  # an objective that reads the sample cannot know its weight in a batch
            per_sample = objective.weight_per_sample(None)
        if objective.plans_exactly:  # this reads what it can of a sample before it is collated
            planned = per_sample or objective.planned_weight_per_sample(self.sample)
        else:
            planned = per_sample or objective.planned_weight_per_sample(self.example) / 2
        return LossWeighting(per_sample=per_sample, planned=planned, exact=objective.plans_exactly)


def build_components(cfg: RunConfig, splits: Mapping[str, Any] | None = None) -> Components:
    """Build everything except the model, the optimizer and the callbacks.

    Raises:
        ConfigError: a target cannot be built.
        DataError: a dataset is absent, damaged or empty.
    """
    return Components(
        strategy=build(cfg.strategy, "strategy"),
        precision=build(cfg.precision, "precision"),
        schedule=build_schedule(cfg.schedule),
        objective=build_objective(cfg),
        datasets=folded(build_splits(cfg.data), cfg.cv) if splits is None else splits,
        numerics=numerics_of(cfg),
        hooks=DataHooks.of(cfg.data),
    )


def build_schedule(node: Mapping[str, Any]) -> Schedule:
    """Build a schedule; a scheduler of torch becomes a function of the step.

    Raises:
        ConfigError: the target is no schedule, or follows a metric.
    """
    if not is_torch_scheduler(target := admitted(node, PLACES["schedule"])):
        schedule: Schedule = build(node, "schedule")
        return schedule
    name = node[TARGET].rpartition(".")[2]
    needed = [*inspect.signature(target.step).parameters.values()][1:]
    if any(arg.default is arg.empty and arg.kind is arg.POSITIONAL_OR_KEYWORD for arg in needed):
        rule = "follows a metric, and a schedule is a function of the step. Use callbacks=[plateau]."
        raise ConfigError([Problem(key="schedule._target_", value=node[TARGET], rule=rule)])
    return TorchSchedule(name=name, make=lambda optimizer: _torch_scheduler(node, optimizer))


def _torch_scheduler(node: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Build a scheduler of torch, and those in it, for an optimizer."""
    inner = {
        key: [_torch_scheduler(entry, optimizer) for entry in value]
        for key, value in node.items()
        if isinstance(value, list | tuple) and any(isinstance(entry, Mapping) and TARGET in entry for entry in value)
    }
    plain = {key: value for key, value in node.items() if key not in inner}
    scheduler: torch.optim.lr_scheduler.LRScheduler = build(plain, "schedule", **{"optimizer": optimizer, **inner})
    return scheduler


def average_of(cfg: RunConfig) -> Average | None:
    """Return the average of the weights that a run keeps."""
    average: Average | None = build(cfg.average, "average") if cfg.average else None
    return average


def conversion_of(cfg: RunConfig) -> Float8 | None:
    """Return the conversion of layers of a run; None if no layer is converted."""
    conversion: Float8 | None = build(cfg.convert, "convert") if cfg.convert else None
    return conversion


def numerics_of(cfg: RunConfig) -> Numerics:
    """Return the numerics settings for a strategy."""
    return Numerics(
        seed=cfg.seed,
        reproducible=cfg.numerics.reproducible,
        lanes=cfg.numerics.lanes,
        on_nonfinite=cfg.numerics.on_nonfinite,
    )


def model_transforms_of(cfg: RunConfig, device: str = "cpu", *, keeps_format: bool = True) -> ModelTransforms:
    """Return which parts of the model are recomputed or compiled, and its memory format on a device.

    Raises:
        ConfigError: the strategy does not support the requested memory format.
    """
    return ModelTransforms(
        recompute=cfg.activation_checkpointing,
        compile_mode=cfg.compile.mode,
        backend=cfg.compile.backend,
        memory_format=format_for(cfg.memory_format, build(cfg.precision, "precision"), device, is_kept=keeps_format),
        cuda_graphs=cfg.compile.cuda_graphs,
    )


def takes_values(model: nn.Module) -> bool:
    """Return whether a model without data is complete once its parameters and buffers have values."""
    known = ("_parameters", "_buffers", "_modules")
    attributes = [vars(module).items() for module in model.modules()]
    leaves = tree_leaves([value for items in attributes for name, value in items if name not in known])
    return all(tensor.is_meta for tensor in model.parameters()) and not any(
        isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, nn.Parameter) for leaf in leaves
    )


def model_of_rank(cfg: RunConfig, strategy: Strategy, rank: int) -> nn.Module:
    """Build the model that a rank gives to `Strategy.setup`: only rank 0 needs the data if it sends them."""
    if rank > 0 and strategy.facts.supports_meta_init:
        model = build_without_data(cfg)
        if model is not None and takes_values(model):
            return model
    return build_model(cfg)


def transformed_model(cfg: RunConfig, strategy: Strategy, task: Task) -> nn.Module:
    """Return the model for the executor of a task, with converted layers, recomputed or compiled."""
    facts = strategy.facts_in(PlanContext())
    model = model_of_rank(cfg, strategy, task.rank)
    if (conversion := conversion_of(cfg)) is not None:
        model = conversion.convert(model, output=output_name(model))
    if (transforms := model_transforms_of(cfg, task.device, keeps_format=facts.keeps_memory_format)) != NO_TRANSFORMS:
        apply_transforms(model, transforms, compiles=facts.compiles)
    return model


def build_callbacks(cfg: RunConfig) -> list[Callback]:
    """Return the callbacks of the run: the default ones, around the callbacks and loggers of the config, in
    its order.
    """
    groups = {"callbacks": cfg.callbacks, "logger": cfg.logger}
    chosen = [build(node, key) for key, nodes in groups.items() for node in nodes.values()]
    callbacks = [StartupSummary(), MetricsFile(), *chosen, FinalSummary()]
    return [callback for callback in callbacks if not (cfg.quiet and callback.prints)]


def make_optimizer(cfg: RunConfig, model: nn.Module) -> Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]:
    """Return a function by which a strategy builds the optimizer for the parameters to update.

    `optimizer.groups` names groups of parameters by `match`, globs on canonical names (`*.bias`) or on the class of the
    module that owns the parameter (`type:*Norm*`); the first matching group applies, with its other keys as settings.
    """
    node = {key: value for key, value in cfg.optimizer.items() if key != "groups"}
    groups = cfg.optimizer.get("groups") or {}
    owners, average = _owners(model), average_of(cfg)

    def make(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        if not params:
            raise ConfigError([Problem(key="model", rule="has no parameter to train.")])
        members: dict[str | None, list[nn.Parameter]] = {None: [], **{name: [] for name in groups}}
        for name, param in params.items():
            members[_group_of(name, owners[name], groups)].append(param)
        settings: dict[str | None, dict[str, Any]] = {None: {}}
        settings.update({name: {k: v for k, v in group.items() if k != "match"} for name, group in groups.items()})
        filled = [{"params": group, **settings[name]} for name, group in members.items() if group]
        optimizer: torch.optim.Optimizer = build(node, "optimizer", params=filled)
        if average is not None:
            average.attach(optimizer)
        return optimizer

    return make


def parameter_matches(model: nn.Module) -> Callable[[str, Sequence[str]], bool]:
    """Return a function that returns whether one of some patterns matches a parameter, by its canonical name."""
    owners = _owners(model)
    return lambda name, patterns: _matches(name, owners[name], patterns)


def group_members(model: nn.Module, groups: Mapping[str, Mapping[str, Any]]) -> dict[str | None, list[str]]:
    """Return the parameters that are trained by their group of `optimizer.groups`; None: those of no group."""
    members: dict[str | None, list[str]] = {None: [], **{group: [] for group in groups}}
    for name, owner in _owners(model).items():
        if model.get_parameter(name).requires_grad:
            members[_group_of(name, owner, groups)].append(name)
    return members


def _owners(model: nn.Module) -> dict[str, str]:
    """Return parameter -> name of the class of the module that owns it."""
    return {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name, _ in model.named_parameters()}


def _group_of(name: str, owner: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    matching = (group for group, settings in groups.items() if _matches(name, owner, settings.get("match", ())))
    return next(matching, None)


def _matches(name: str, owner: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(owner, pattern.removeprefix("type:")) if pattern.startswith("type:") else fnmatchcase(name, pattern)
        for pattern in patterns
    )


def output_name(model: nn.Module) -> str | None:
    """Return the name of the output layer: the one that the model declares, else its last linear layer.

    Example:
        >>> output_name(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()))
        '1'
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    offered = offered_by(model)
    declared = next((name for name, module in linear.items() if module is offered), None)
    return declared or next(reversed(linear), None)


def averaged_split(split: str, average: Average) -> str:
    """Return the name of a split in the metrics of the averaged weights.

    Example:
        >>> from trainkit.adapters.average import Ema
        >>> averaged_split("val", Ema())
        'val_ema'
    """
    return f"{split}_{average.name}"


def average_problems(average: Average, splits: Iterable[str], num_steps: int) -> Iterator[Problem]:
    """Yield the problems of an average that never begins, or whose metrics have the name of a split of the data."""
    splits = list(splits)
    if average.start_step > num_steps:
        rule = f"is after the last step: the run has {num_steps:,}. Give a smaller one."
        yield Problem(key="average.start_step", value=average.start_step, rule=rule)
    for split in splits:
        if (name := averaged_split(split, average)) in splits:
            rule = f"names its metrics {name}/..., and the data has a split of that name. Rename the split."
            yield Problem(key="average", value=average.name, rule=rule)


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
    """Return the learning rate of every step, from the base rate of an optimizer and a schedule.

    Raises:
        ConfigError: the schedule does not suit the run.
    """
    if cfg.stop_after is not None and isinstance(schedule, TorchSchedule):
        rule = "fixes its rates by the number of steps, which stop_after leaves open. Use a schedule of trainkit."
        raise ConfigError([Problem(key="schedule._target_", value=schedule.name, rule=rule)])
    peak = scale_lr(
        base, global_size=batch.global_size, reference_size=cfg.lr_scaling.reference_batch, rule=cfg.lr_scaling.rule
    )
    epochs = cfg.warmup.epochs
    warmup = (cfg.warmup.steps or 0) if epochs is None else round(epochs * batch.steps_per_epoch)
    start = base if cfg.warmup.start == "base" else 0.0
    if isinstance(schedule, NeedsRun):
        schedule = schedule.placed(
            base=base, warmup_steps=warmup, num_steps=num_steps, steps_per_epoch=batch.steps_per_epoch
        )
    return LearningRate(base=base, peak=peak, start=start, warmup_steps=warmup, num_steps=num_steps, schedule=schedule)


_OPEN_END: Final = 10**9
"""Updates that no training reaches in the time of its `stop_after`."""


def num_steps_of(cfg: RunConfig, batch: BatchPlan) -> int:
    """Return the updates of the whole training; with `stop_after`, those after which it ends in any case."""
    if cfg.stop_after is not None and cfg.epochs is None and cfg.steps is None:
        return _OPEN_END
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
    planned = []
    for name, entry in cfg.optimizers.items():
        node = optimizer_node(cfg.optimizer, entry)
        repeats, every = passes_of(entry.get("ratio", 1)) or (1, 1)
        other = entry.get("schedule")
        planned.append(
            PlannedOptimizer(
                name=name,
                node=node,
                match=tuple(entry.get("match") or ()),
                rate=rate_of(float(node["lr"]), schedule if other is None else _schedule(other, name)),
                phase=Phase(name=name, repeats=repeats, every=every),
            )
        )
    return tuple(planned)


def _schedule(node: Mapping[str, Any], name: str) -> Schedule:
    try:
        return build_schedule(node)
    except ConfigError as error:
        problems = [replace(problem, key=f"optimizers.{name}.{problem.key}") for problem in error.problems]
        raise ConfigError(problems) from error


def phase_problems(optimizers: Sequence[PlannedOptimizer], objective: Objective) -> list[Problem]:
    """Return phases without an optimizer, optimizers without a phase, and ratios without effect."""
    kind, names, phases = type(objective).__name__, [optimizer.name for optimizer in optimizers], objective.phases
    if not phases:
        rule = f"has no effect: {kind} names no phases, and all optimizers step together."
        return [
            Problem(key=f"optimizers.{optimizer.name}.ratio", rule=rule)
            for optimizer in optimizers
            if (optimizer.phase.repeats, optimizer.phase.every) != (1, 1)
        ]
    all_phases = ", ".join(phases)
    if not names:
        rule = f"{kind} has the phases {all_phases}. Give each an optimizer, {phases[0]}: {{match: ['{phases[0]}.*']}}."
        return [Problem(key="optimizers", rule=rule)]
    problems = [
        Problem(key=f"optimizers.{name}", rule=f"{kind} has no such phase. There are: {all_phases}.")
        for name in names
        if name not in phases
    ]
    problems += [
        Problem(key="optimizers", rule=f"has no {name}, which is a phase of {kind}. Give it an optimizer.")
        for name in phases
        if name not in names
    ]
    if not problems and all(optimizer.phase.every > 1 for optimizer in optimizers):
        rule = "every phase skips steps, and some steps would have no phase. Give one of them a ratio of 1 or more."
        problems.append(Problem(key="optimizers", rule=rule))
    return problems


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
    assigned = {optimizer.name: [name for name in trained if takes(name, optimizer.match)] for optimizer in optimizers}
    taken = {name for names in assigned.values() for name in names}
    for optimizer in optimizers:
        if not optimizer.match:
            assigned[optimizer.name] = [name for name in trained if name not in taken]
    return assigned


def assignment_problems(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> list[Problem]:
    """Return patterns that match nothing, and parameters of no optimizer or of two."""
    takes, params, problems = parameter_matches(model), dict(model.named_parameters()), list[Problem]()
    for optimizer in optimizers:
        for pattern in optimizer.match:
            matched = [name for name in params if takes(name, (pattern,))]
            if not matched:
                rule = f"matches no parameter of the model, which has {listed(params, 3)}."
            elif not any(params[name].requires_grad for name in matched):
                rule = f"matches only frozen parameters: {listed(matched, 3)}."
            else:
                continue
            problems.append(Problem(key=f"optimizers.{optimizer.name}.match", value=pattern, rule=rule))
    assigned, owner = assigned_parameters(model, optimizers), dict[str, str]()
    for label, names in assigned.items():
        twice = [name for name in names if name in owner]
        if twice:
            rule = f"takes {listed(twice, 3)}, which optimizers.{owner[twice[0]]} takes, too. Each needs one optimizer."
            problems.append(Problem(key=f"optimizers.{label}.match", rule=rule))
        if not names and not problems:
            rule = "takes no parameter: the others take all. Leave it out, or narrow their patterns."
            problems.append(Problem(key=f"optimizers.{label}", rule=rule))
        owner.update(dict.fromkeys(names, label))
    untaken = [name for name, param in params.items() if param.requires_grad and name not in owner]
    if untaken and not problems:
        rule = f"no optimizer takes {listed(untaken, 3)}. Leave the match of one optimizer out, or freeze them."
        problems.append(Problem(key="optimizers", rule=rule))
    return problems


def optimizer_notes(model: nn.Module, optimizers: Sequence[PlannedOptimizer]) -> list[str]:
    """Return a line for each optimizer: the parameters that it updates."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return [
        f"optimizers.{label} updates {sum(sizes[name] for name in names):,} parameters: {listed(names, 3)}"
        for label, names in assigned_parameters(model, optimizers).items()
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
            name=entry.name,
            params=frozenset(assigned[entry.name]),
            make=make_optimizer(
                replace(cfg, optimizer={key: (replaced or {}).get(key, value) for key, value in entry.node.items()}),
                model,
            ),
            factor=entry.rate.factor,
        )
        for entry in optimizers
    )
