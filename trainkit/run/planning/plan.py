"""The plan of a run: everything that is resolved before a device is used.

The process that resolved it sends it to the ranks, which then only build the components. A rank that another program or
user starts receives no plan, and makes its own.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import device, nn
from torch.optim import Optimizer

from trainkit.cluster.debug import Debug
from trainkit.cluster.host import VISIBLE, count_gpus, memory_share, mig_instances
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Task
from trainkit.config.identity import fingerprint
from trainkit.config.optimizers import optimizer_node
from trainkit.config.schema import RunConfig
from trainkit.config.sections import BatchConfig
from trainkit.config.targets.allowed import IN_PROCESS, TARGET, root_of
from trainkit.config.targets.build import build, class_built_by
from trainkit.config.values import seconds_of
from trainkit.data.hooks import Reading
from trainkit.data.splits import size_of, validation_splits
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError, refuse, together
from trainkit.files import parse_json
from trainkit.numerics.batch import BatchPlan, BatchSizes, resolve_batch
from trainkit.numerics.schedules import LearningRate, unreduced
from trainkit.run.planning.build import (
    Components,
    PlannedOptimizer,
    average_of,
    average_problems,
    build_components,
    conversion_of,
    model_transforms_of,
    num_steps_of,
    phase_problems,
    rates_of,
    strategy_problems,
)
from trainkit.run.process_backend import ProcessBackend
from trainkit.strategies.base import Phase, PlanContext, StepCut, Strategy
from trainkit.strategies.core.refusals import MakeOptimizer
from trainkit.trainer.events import Callback, callback_problems
from trainkit.trainer.time_limit import read_record

_EVALUATOR: Final = "trainkit.run.session.evaluator_main"


def refuse_launch(cfg: RunConfig, launch: LaunchEnvironment) -> None:
    """Refuse a launch whose tasks the strategy cannot use: in each process, before it waits for the others.

    Raises:
        ConfigError: the strategy has no such roles, or needs other numbers of tasks.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    refuse([*strategy.launch_problems(launch.training), *_missing_evaluator(strategy, launch)])


def _missing_evaluator(strategy: Strategy, launch: LaunchEnvironment | None) -> list[Problem]:
    """Return the problem of an evaluator that the strategy asks for, and that the launch does not start."""
    needed = any(task.is_evaluator for task in strategy.tasks(PlanContext()))
    if launch is None or launch.has_evaluator or not needed:
        return []
    use = "Name one: evaluator=[HOST:PORT]." if launch.names_roles else f"Start it by hand: python -m {_EVALUATOR} RUN"
    rule = f"{launch.kind} starts the processes, and no evaluator. {use}"
    return [Problem(key="strategy.evaluator", value=True, rule=rule)]


def task_problems(
    cfg: RunConfig,
    parts: Components,
    facts: PlanContext,
    backend: ProcessBackend | None,
    launch: LaunchEnvironment | None,
) -> list[Problem]:
    """Return why a run cannot have its tasks, its evaluator, or fewer tasks later.

    Args:
        cfg: a checked config.
        parts: the objects of the training; the strategy accepts `facts`.
        facts: the context of the plan.
        backend: starts the processes; None: this machine does.
        launch: the external launch with its evaluator; None: there is no launch.
    """
    problems = _elastic_problems(cfg, parts, facts, backend) if cfg.elastic.min_replicas is not None else []
    problems += _mig_problems(parts, facts) if backend is None and facts.num_gpus > 1 else []
    by_launch = launch is not None and launch.has_evaluator
    needed = any(task.is_evaluator for task in parts.strategy.tasks(replace(facts, launch=None)))
    if cfg.eval.beside or needed or by_launch:
        problems += _evaluator_problems(cfg, parts, launch, backend, needed=needed)
    return problems


def _elastic_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    """Return why the run cannot continue with fewer tasks, as `elastic.min_replicas` asks."""
    fewest = cfg.elastic.min_replicas
    count, of_strategy = len(parts.strategy.tasks(facts)), parts.strategy.facts_in(facts)
    replicas = count // of_strategy.ranks_a_replica
    if fewest is None or count == 1:  # the config check has already reported that a single process ignores the key
        return []
    if facts.launch is not None:
        rule = f"has no effect under {facts.launch.kind}, which restarts processes itself: set the number there."
    elif backend is not None and not backend.elastic:
        rule = f"has no effect: {backend.name} starts all processes or none."
    elif not of_strategy.elastic or (count == of_strategy.ranks_a_replica):
        rule = "has no effect: this strategy needs all its processes."
    elif backend is not None and of_strategy.ranks_a_replica > 1:
        rule = (
            f"has no effect: {backend.name} loses ranks one by one, and {of_strategy.ranks_a_replica} make a replica."
        )
    elif fewest > replicas:
        rule = f"more than the {replicas} replicas of this run. Use {replicas} or fewer."
    else:
        return []
    return [Problem(key="elastic.min_replicas", value=fewest, rule=rule)]


def _mig_problems(parts: Components, facts: PlanContext) -> list[Problem]:
    """Return the problem of a process with several MIG instances, of which CUDA shows only one."""
    names = mig_instances(os.environ)
    if len(names) < 2 or facts.launch is not None:
        return []
    tasks = parts.strategy.tasks(facts)
    alone = len(tasks) == 1 and tasks[0].device not in ("cpu", "cuda:0")
    if not alone and parts.strategy.num_slots(facts.num_gpus) <= len(tasks):
        return []
    rule = f"a process uses one MIG instance, and {VISIBLE} names {len(names)}. Name one, or use one per process."
    return [Problem(key="strategy", rule=rule)]


def _evaluator_problems(
    cfg: RunConfig, parts: Components, launch: LaunchEnvironment | None, backend: ProcessBackend | None, *, needed: bool
) -> list[Problem]:
    """Return why the run cannot have an evaluator: of the strategy (`needed`), of the launch, or of `eval.beside`."""
    by_launch = launch is not None and launch.has_evaluator
    key = "cluster.evaluator" if by_launch else "strategy.evaluator" if needed else "eval.beside"
    started = launch.kind if launch is not None else backend.name if backend is not None else None
    unstarted = f"{started} starts the processes. Start the evaluator by hand: python -m {_EVALUATOR} RUN"
    rules = {
        "the strategy has its own evaluator. Leave one of them out.": needed,
        "the cluster has an evaluator. Leave one of them out.": by_launch and not needed,
        unstarted: started is not None,
        "the run may continue with fewer tasks (elastic.min_replicas). Leave one of them out.": (
            cfg.elastic.min_replicas is not None
        ),
    }
    problems = [
        Problem(key="eval.beside", value=True, rule=rule) for rule, holds in rules.items() if holds and cfg.eval.beside
    ]
    problems += _missing_evaluator(parts.strategy, launch)
    if not validation_splits(parts.datasets):
        problems.append(Problem(key=key, rule="has no validation split to evaluate on: the data has none."))
    for name, node in cfg.callbacks.items():
        if getattr(class_built_by(node), "decides_by_figures", False):
            rule = f"needs evaluations during the training, which {key} moves to a separate process. Leave one out."
            problems.append(Problem(key=f"callbacks.{name}", rule=rule))
    return problems


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run with all values resolved."""

    cfg: RunConfig
    """The config with every auto value resolved: the content of `resolved.yaml`."""
    components: Components
    """The objects of the training."""
    tasks: tuple[Task, ...]
    """The processes of the run."""
    num_replicas: int
    """Replicas that compute their own shards."""
    batch: BatchPlan
    """Division of steps into shards."""
    num_steps: int
    """Steps of the whole training."""
    rate: LearningRate
    """The learning rate of every step; of the first of several optimizers."""
    optimizers: tuple[PlannedOptimizer, ...] = ()
    """Several optimizers; empty: the one of `cfg.optimizer`."""
    context: PlanContext = field(default_factory=PlanContext)
    """The context that the strategy was validated with."""
    backend: ProcessBackend | None = None
    """The backend that starts the processes, if this machine does not."""
    debugged_rank: int | None = None
    """The rank that the process of the terminal becomes, for a debugger; None: it debugs none."""
    batch_config: BatchConfig = field(default_factory=BatchConfig)
    """The sizes of a step as the config gives them; `cfg` holds the resolved ones."""

    def reading(self, target: device) -> Reading:
        """Return the settings for reading the samples of this run, for batches on a device."""
        return Reading(device=target, settings=self.cfg.loader, hooks=self.components.hooks, seed=self.cfg.seed)

    @property
    def micro_size_depends_on_replicas(self) -> bool:
        """Whether the cut of a step depends on the number of replicas, because the config leaves it open."""
        return self.batch_config.micro_size is None and not self.cfg.numerics.reproducible

    def highest_rate(self, step: int) -> float:
        """Return the highest learning rate of a step, of all optimizers."""
        return max(rate(step) for rate in (self.rate, *(optimizer.rate for optimizer in self.optimizers)))

    @property
    def last_step(self) -> int:
        """Updates after which this start of the run ends."""
        stop = self.cfg.stop_at_step
        return self.num_steps if stop is None else min(self.num_steps, self.next_sync_step(stop))

    @property
    def stop_after_s(self) -> float | None:
        """Seconds of training after which the run ends; None: its number of updates alone ends it."""
        return None if self.cfg.stop_after is None else seconds_of(self.cfg.stop_after)

    @property
    def auxiliary_ranks(self) -> tuple[int, ...]:
        """Ranks that do not run the training loop."""
        strategy = self.components.strategy
        return tuple(task.rank for task in self.tasks if task.is_evaluator or not strategy.runs_loop(task))

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks without the evaluator, which comes last."""
        return tuple(task for task in self.tasks if not task.is_evaluator)

    @property
    def num_computing(self) -> int:
        """Number of tasks that compute shards."""
        return sum(task.role in {"chief", "worker"} for task in self.tasks)

    @property
    def has_evaluator(self) -> bool:
        """Whether a task evaluates checkpoints in parallel to the training."""
        return any(task.is_evaluator for task in self.tasks)

    @property
    def is_measurement(self) -> bool:
        """Whether a callback only measures: the run writes no checkpoint."""
        return any(getattr(class_built_by(node), "measures_only", False) for node in self.cfg.callbacks.values())

    @property
    def replaceable(self) -> tuple[int, ...]:
        """Ranks that are restarted alone when they die."""
        strategy = self.components.strategy
        return tuple(task.rank for task in self.tasks if task.is_evaluator or strategy.restarts_alone(task))

    @property
    def eval_batch_size(self) -> int:
        """Samples per forward pass in evaluation."""
        return self.cfg.eval.batch_size or max(self.batch.micro_size, 256)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step, in the order of the objective; empty if it names none."""
        by_name = {optimizer.name: optimizer.phase for optimizer in self.optimizers}
        return tuple(by_name[name] for name in self.components.objective.phases)

    def next_sync_step(self, step: int) -> int:
        """Return the first step >= `step` at which the run may be evaluated, saved and stopped."""
        return self.components.strategy.next_sync_step(step)

    def resolved(self, build: Callable[[], nn.Module]) -> RunPlan:
        """Return the plan with the choices that its strategy makes for the model."""
        strategy = self.components.strategy.resolve(build, self.context)
        return replace(self, components=replace(self.components, strategy=strategy))

    def with_rates(
        self, *, reduced: Callable[[int], float] = unreduced, length: Callable[[int], int] | None = None
    ) -> RunPlan:
        """Return the plan with a factor on the learning rate of every update, and an estimated length of the training,
        of all optimizers.
        """
        adjusted = partial(replace, reduced=reduced, length=length)
        optimizers = tuple(replace(optimizer, rate=adjusted(optimizer.rate)) for optimizer in self.optimizers)
        return replace(self, rate=adjusted(self.rate), optimizers=optimizers)

    def summary(self, num_params: int) -> dict[str, str]:
        """Return the effective values for the user, label -> text."""
        full, batch, cfg = self.batch.num_shards(0), self.batch, self.cfg
        factors = f"{full} shards of at most {batch.micro_size}" if full > 1 else "1 shard"
        replicas = f"{self.num_replicas} replica{'' if self.num_replicas == 1 else 's'}"
        peak = f"{self.rate.peak:g}"
        if self.rate.peak != self.rate.base:
            scaling = cfg.lr_scaling
            peak += f" ({self.rate.base:g} at {scaling.reference_batch}, {scaling.rule} rule)"
        computing = [
            device for task in self.tasks if not task.is_evaluator for device in task.computes_on or (task.device,)
        ]
        share = memory_share(os.environ) if "cuda" in "".join(computing) else 1.0
        devices = sorted({device.partition(":")[0] for device in computing})
        warmup = f"{self.rate.warmup_steps} steps from {self.rate.start:g}" if self.rate.warmup_steps else "none"
        roles = Counter(task.role for task in self.tasks)
        sampler, steps = self.components.hooks.sampler, f"{self.num_steps:,}"
        drawn = (
            "" if sampler is None else f", drawn by {sampler.name}: an epoch does not contain every sample exactly once"
        )
        if cfg.stop_after is not None:
            most = "" if cfg.epochs is None and cfg.steps is None else f", {steps} at most"
            steps = f"those of {cfg.stop_after} of training{most}"
        share_skipped = f"{cfg.numerics.max_skipped_share * 100:g} %"
        reactions = {
            "skip": f"skipped, at most {cfg.numerics.max_skips_in_a_row} steps in a row and {share_skipped} of all",
            "rollback": "trained again from the last checkpoint",
        }
        rows = {
            "recipe": cfg.recipe,
            "strategy": cfg.strategy["_target_"].rpartition(".")[2],
            "tasks": ", ".join(f"{n} {role}" for role, n in roles.items()) if roles.keys() - {"worker"} else None,
            "replicas": f"{self.num_replicas} on {', '.join(devices)}",
            "samples": f"{batch.num_samples:,} for training{drawn}",
            "global batch": f"{batch.global_size} = {factors} on {replicas}",
            "steps": f"{steps} ({batch.steps_per_epoch:,} an epoch)",
            "optimizers": ", ".join(planned.text for planned in self.optimizers) or None,
            "learning rate": ", ".join(f"{planned.name} {planned.rate.peak:g}" for planned in self.optimizers) or peak,
            "warmup": warmup,
            "schedule": cfg.schedule["_target_"].rpartition(".")[2],
            "precision": self.components.precision.value,
            "average": average.name if (average := average_of(cfg)) else None,
            "converted": f"float8, {conversion.recipe}" if (conversion := conversion_of(cfg)) else None,
            "parameters": f"{num_params:,}",
            "reduce": self.components.strategy.sum_of_gradients(self.context) if self.num_replicas > 1 else None,
            "recomputed": model_transforms_of(cfg).recomputed,
            "compiled": None if cfg.compile.mode == "off" else f"{cfg.compile.mode}, {cfg.compile.backend}",
            "memory": f"at most {share:.0%} of each GPU, which jobs of a sweep share" if share < 1 else None,
            "not finite": reactions.get(cfg.numerics.on_nonfinite),
            "reproducible": f"yes, {cfg.numerics.lanes} lanes" if cfg.numerics.reproducible else None,
        }
        return {label: text for label, text in rows.items() if text}


def make_plan(
    cfg: RunConfig,
    *,
    num_gpus: int | None = None,
    launch: LaunchEnvironment | None = None,
    splits: Mapping[str, Any] | None = None,
) -> RunPlan:
    """Resolve everything about a run; starts no process and needs no GPU.

    Args:
        cfg: a checked config.
        num_gpus: CUDA devices to plan for; None: those of this host.
        launch: the external launch that this process belongs to.
        splits: the datasets, if they were built already.

    Raises:
        ConfigError: all problems of this combination.
        DataError: a dataset is absent, damaged or empty.
    """
    cluster = build(cfg.cluster, "cluster") if cfg.cluster else None
    backend = cluster if isinstance(cluster, ProcessBackend) else None
    debug = cluster if isinstance(cluster, Debug) else None
    cfg = cfg if debug is None else debug.without_limits(cfg)
    parts = build_components(cfg, splits)
    if num_gpus is None:
        num_gpus = count_gpus() if backend is None or backend.num_gpus == "auto" else backend.num_gpus
    context = plan_context(cfg, parts, num_gpus=num_gpus, launch=launch)

    def cut() -> BatchPlan:
        problems = strategy_problems(parts.strategy, context) if cfg.optimizers else []
        problems += [*parts.strategy.validate(context), *parts.strategy.access_problems(context)]
        refuse(problems or task_problems(cfg, parts, context, backend, launch))
        return _batch_plan(cfg, parts, context)

    batch = together(
        parts.refuse_unknown_fields,
        lambda: parts.hooks.refuse_misfits(parts.datasets["train"], cfg.loader),
        lambda: refuse(callback_problems(parts.planned(cfg))),
        then=cut,
    )
    resolved = replace(
        cfg, batch=replace(cfg.batch, global_size=batch.global_size, micro_size=batch.micro_size, accumulation=None)
    )
    if backend is not None:  # a worker sees only its own GPU
        resolved = replace(resolved, cluster={**cfg.cluster, "num_gpus": context.num_gpus})
    tasks = parts.strategy.tasks(context)
    if cfg.eval.beside or (launch is not None and launch.has_evaluator):
        tasks = (*tasks, Task(role="evaluator", index=0, rank=len(tasks)))
    plan = _plan_of(resolved, parts, context, tasks, batch)
    problems = phase_problems(plan.optimizers, parts.objective) if plan.optimizers or parts.objective.phases else []
    problems += average_problems(context.average, parts.datasets, plan.num_steps) if context.average else []
    problems += _rate_problems(plan)
    refuse(problems)
    if debug is not None:
        debug.refuse_absent_rank(tasks)
    rank = None if debug is None else debug.rank
    return replace(plan, batch_config=cfg.batch, backend=backend, debugged_rank=rank)


def _rate_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield why a training cannot have rates that are known only while it runs, or repeat those of another."""
    cfg = plan.cfg
    if cfg.stop_after is not None and cfg.stop_after_record is not None:
        read_record(Path(cfg.stop_after_record).expanduser(), cfg.stop_after)
    servers = any(not task.is_evaluator and task.rank in plan.auxiliary_ranks for task in plan.tasks)
    if not plan.optimizers or not servers:
        return
    rule = "servers compute the rates of several optimizers by the step."
    if cfg.stop_after is not None:
        yield Problem(key="stop_after", value=cfg.stop_after, rule=f"{rule} Use steps=N, or another strategy.")
    for name, node in cfg.callbacks.items():
        kind = class_built_by(node)
        if isinstance(kind, type) and issubclass(kind, Callback) and kind.rate_factor is not Callback.rate_factor:
            yield Problem(key=f"callbacks.{name}", rule=f"{rule} Leave it out, or use another strategy.")


def _plan_of(
    cfg: RunConfig, parts: Components, context: PlanContext, tasks: tuple[Task, ...], batch: BatchPlan
) -> RunPlan:
    rate, optimizers = rates_of(cfg, batch, parts.schedule)
    return RunPlan(
        cfg=cfg,
        components=parts,
        tasks=tasks,
        context=replace(context, micro_size=batch.micro_size),
        num_replicas=parts.strategy.num_replicas(context),
        batch=batch,
        num_steps=num_steps_of(cfg, batch),
        rate=rate,
        optimizers=optimizers,
    )


def plan_context(cfg: RunConfig, parts: Components, *, num_gpus: int, launch: LaunchEnvironment | None) -> PlanContext:
    """Return the context in which a strategy validates a config; the size of a shard is not resolved yet."""
    return PlanContext(
        numerics=parts.numerics,
        num_gpus=num_gpus,
        precision=parts.precision.value,
        optimizer=class_built_by(cfg.optimizer),
        optimizers={name: class_built_by(optimizer_node(cfg.optimizer, node)) for name, node in cfg.optimizers.items()},
        optimizer_makers=_optimizer_makers(cfg),
        objective=parts.objective,
        sample=parts.sample,
        collate=parts.hooks.collate_function,
        average=average_of(cfg),
        launch=None if launch is None else launch.training,
    )


def _optimizer_makers(cfg: RunConfig) -> dict[str, list[MakeOptimizer]]:
    """Return functions that build each optimizer as the config sets it, for each of its groups of parameters."""
    nodes = {f"optimizers.{name}": optimizer_node(cfg.optimizer, entry) for name, entry in cfg.optimizers.items()}
    makers: dict[str, list[MakeOptimizer]] = {}
    for key, node in (nodes or {"optimizer": cfg.optimizer}).items():
        settings = {name: value for name, value in node.items() if name != "groups"} | {"lr": 0.1}
        groups = [
            {name: value for name, value in group.items() if name != "match"}
            for group in (node.get("groups") or {}).values()
        ]
        makers[f"{key}.{TARGET}"] = [partial(_build_optimizer, {**settings, **group}) for group in [{}, *groups]]
    return makers


def _build_optimizer(node: Mapping[str, Any], params: list[nn.Parameter]) -> Optimizer:
    optimizer: Optimizer = build(node, "optimizer", params=params)
    return optimizer


def batch_sizes(cfg: RunConfig, strategy: Strategy, context: PlanContext) -> BatchSizes | list[Problem]:
    """Return the sizes of the batch and of its shards under a strategy, or the problems."""
    return resolve_batch(
        global_size=cfg.batch.global_size,
        micro_size=cfg.batch.micro_size,
        accumulation=cfg.batch.accumulation,
        num_replicas=strategy.num_replicas(context),
        lanes=cfg.numerics.lanes if cfg.numerics.reproducible else None,
        shards_a_replica=strategy.facts_in(context).shards_per_replica,
    )


def _batch_plan(cfg: RunConfig, parts: Components, context: PlanContext) -> BatchPlan:
    sizes = batch_sizes(cfg, parts.strategy, context)
    if isinstance(sizes, list):
        raise ConfigError(sizes)
    num_samples = size_of(parts.datasets["train"])
    batch = BatchPlan(
        num_samples=num_samples,
        global_size=sizes.global_size,
        micro_size=sizes.micro_size,
        drop_last=cfg.batch.drop_last,
    )
    if batch.steps_per_epoch == 0:
        rule = f"larger than the {num_samples} training samples, and batch.drop_last leaves the short batch out."
        raise ConfigError([Problem(key="batch.global_size", value=sizes.global_size, rule=rule)])
    return batch


VARIABLE: Final = "TRAINKIT_PLAN"
"""Environment variable that holds, as JSON, the values of the plan that `resolved.yaml` lacks."""


def plan_to_environ(plan: RunPlan) -> dict[str, str]:
    """Return the environment variable that `plan_from_environ` reads in a rank."""
    launch = plan.context.launch
    values = {
        "tasks": [asdict(task) for task in plan.tasks],
        "launch": None if launch is None else asdict(launch),
        "num_gpus": plan.context.num_gpus,
        "num_samples": plan.batch.num_samples,
        "given": asdict(plan.batch_config),
    }
    return {VARIABLE: json.dumps(values)}


def plan_from_environ(environ: MutableMapping[str, str], cfg: RunConfig) -> RunPlan | None:
    """Return the plan that the parent of this rank has sent, with components of this process; None if it sent none.

    The variable is removed: it is not for child processes.

    Raises:
        TrainkitError: the variable is malformed.
        DataError: a dataset is absent or damaged, or has another number of samples here.
    """
    text = environ.pop(VARIABLE, "")
    if not text:
        return None
    parts = build_components(cfg)
    try:
        plan = _planned(cfg, parts, parse_json(text))
    except (ValueError, TypeError, KeyError) as error:
        raise TrainkitError(f"{VARIABLE} holds no plan: {error}") from error
    num_samples = size_of(parts.datasets["train"])
    if num_samples != plan.batch.num_samples:
        raise DataError(
            f"the training data has {num_samples} samples in this process, and {plan.batch.num_samples} in the process "
            "that planned the run."
        )
    return plan


def _planned(cfg: RunConfig, parts: Components, values: Mapping[str, Any]) -> RunPlan:
    launch = None if values["launch"] is None else LaunchEnvironment.from_json(values["launch"])
    if cfg.batch.global_size is None or cfg.batch.micro_size is None:
        raise ValueError("the config does not set the size of a shard")
    context = plan_context(cfg, parts, num_gpus=values["num_gpus"], launch=launch)
    batch = BatchPlan(
        num_samples=values["num_samples"],
        global_size=cfg.batch.global_size,
        micro_size=cfg.batch.micro_size,
        drop_last=cfg.batch.drop_last,
    )
    tasks, batch_config = tuple(Task.from_json(task) for task in values["tasks"]), BatchConfig(**values["given"])
    return replace(_plan_of(cfg, parts, context, tasks, batch), batch_config=batch_config)


ChooseWorkers = Callable[[RunPlan], tuple[int, str]]
"""Function that returns the number of data loading processes for a plan, and a note about it."""

_KEY: Final = "loader.num_workers"


def with_workers(plan: RunPlan, choose: ChooseWorkers | None) -> tuple[RunPlan, str]:
    """Return the plan with a number instead of `auto`, and a note about it.

    Args:
        plan: the plan of a run that is about to begin.
        choose: measures the number; None if that is impossible.

    Raises:
        ConfigError: `auto` cannot be measured for this run.
    """
    cfg = plan.cfg
    targets = [str(node.get(TARGET, "")) for node in (cfg.model, cfg.data, cfg.objective, cfg.optimizer)]
    # another process cannot build an object of this session
    if choose is None or plan.backend is not None or any(root_of(target) == IN_PROCESS for target in targets):
        raise ConfigError([_unmeasured()])
    number, note = choose(plan)
    return replace(plan, cfg=replace(cfg, loader=replace(cfg.loader, num_workers=number))), f"{_KEY}=auto: {note}"


def refuse_open_workers(cfg: RunConfig) -> None:
    """Refuse `auto` if no run begins.

    Raises:
        ConfigError: `loader.num_workers` is `auto`.
    """
    if cfg.loader.num_workers == "auto":
        raise ConfigError([_unmeasured()])


def _unmeasured() -> Problem:
    rule = (
        "is measured by short trainings in processes that trainkit starts on this host, and here it starts none. Give "
        "a number: trainkit bench --data finds it."
    )
    return Problem(key=_KEY, value="auto", rule=rule)


_LISTED: Final = 8
"""Up to this many tasks, each is named."""


def imagined_launch(hosts: int, gpus_per_host: int) -> LaunchEnvironment:
    """Return an imagined launch of one process per GPU on several hosts.

    Example:
        >>> imagined_launch(8, 8).num_ranks
        64
    """
    return LaunchEnvironment(
        kind=f"--hosts {hosts} --gpus-per-host {gpus_per_host}",
        tasks=workers(hosts * gpus_per_host),
        rank=0,
        local_rank=0,
        num_local=gpus_per_host,
        num_hosts=hosts,
        store=("host-0", 29400),
    )


def where_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines of `trainkit plan`: label, text."""
    yield "tasks", _tasks_text(plan)
    if 1 < plan.num_replicas < plan.num_computing:
        yield "ranks", f"{plan.num_replicas} replicas of {plan.num_computing // plan.num_replicas} each"
    if (bubble := ideal_bubble_of(plan)) is not None:
        yield "bubble", f"{bubble:.1%} of a step, with equal stages"
    yield "fingerprint", fingerprint(plan.cfg)[:12]


def ideal_bubble_of(plan: RunPlan) -> float | None:
    """Return the share of a step that each stage waits, with equal stages; None without stages."""
    cut = StepCut(num_shards=plan.batch.num_shards(0), num_replicas=plan.num_replicas)
    return plan.components.strategy.bubble(cut)


def _tasks_text(plan: RunPlan) -> str:
    tasks, launch = plan.tasks, plan.context.launch
    hosts = "" if launch is None or launch.num_hosts == 1 else f", {len(tasks) // launch.num_hosts} on each host"
    if len(tasks) > _LISTED:
        return ", ".join(_folded(tasks, by_type=launch is not None)) + hosts
    devices: dict[str, list[str]] = {}
    for task in tasks:
        others = [device for device in task.computes_on if device != task.device]
        text = f"{task.device}, computes on {', '.join(task.computes_on)}" if others else task.device
        devices.setdefault(text, []).append(str(task))
    placed = ", ".join(f"{' '.join(names)} on {device}" for device, names in devices.items())
    return f"{placed}{hosts}" if len(tasks) > 1 else f"{placed}, in this process"


def _folded(tasks: Sequence[Task], *, by_type: bool) -> Iterator[str]:
    """Yield a text for the tasks of each role, with consecutive numbers joined.

    Args:
        tasks: the tasks by rank.
        by_type: show only the types of devices: in a launch, numbers are known for this host only.
    """
    for role in dict.fromkeys(task.role for task in tasks):
        members = [task for task in tasks if task.role == role]
        last = members[-1].index
        names = f"{role}:{members[0].index}" + (f" to {role}:{last}" if len(members) > 1 else "")
        devices = list(dict.fromkeys(task.device.partition(":")[0] if by_type else task.device for task in members))
        placed = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
        yield f"{names} on {placed}"
