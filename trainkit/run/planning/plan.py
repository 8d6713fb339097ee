"""The plan of a run: everything that is resolved before a device is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.optimizers import optimizer_node
from trainkit.config.schema import RunConfig
from trainkit.config.sections import NumericsConfig
from trainkit.config.targets.build import build, resolve_target
from trainkit.data.hooks import DataHooks
from trainkit.data.splits import size_of, validation_splits
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.batch import BatchPlan, resolve_batch
from trainkit.numerics.schedules import LearningRate, Schedule, scale_lr
from trainkit.run.backends.base import ProcessBackend
from trainkit.run.planning.averages import average_of, average_problems
from trainkit.run.planning.build import Components, build_components
from trainkit.run.planning.optimizers import PlannedOptimizer, phase_problems, planned_optimizers, strategy_problems
from trainkit.strategies.base import PlanContext
from trainkit.strategies.capabilities import (
    access_problems,
    default_shards_per_replica,
    next_sync_step,
    resolve,
    restarts_alone,
    runs_loop,
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run with all values resolved."""

    cfg: RunConfig
    """The config with every auto value resolved: the content of `resolved.yaml`."""
    components: Components
    """The objects that the training consists of."""
    tasks: tuple[Task, ...]
    """The processes of the run."""
    num_replicas: int
    """Replicas that compute their own shards."""
    batch: BatchPlan
    """How steps are cut into shards."""
    num_steps: int
    """Steps of the whole training."""
    rate: LearningRate
    """The learning rate of every step; of the first of several optimizers."""
    optimizers: tuple[PlannedOptimizer, ...] = ()
    """Several optimizers; empty: the one of `cfg.optimizer`."""
    facts: PlanContext = field(default_factory=PlanContext)
    """The context that the strategy was validated with."""
    backend: ProcessBackend | None = None
    """The backend that starts the processes, if this machine does not."""
    micro_size_depends_on_replicas: bool = False
    """Whether the cut of a step depends on the number of replicas, because the config leaves it open."""

    def highest_rate(self, step: int) -> float:
        """Return the highest learning rate of a step, of all optimizers."""
        return max(rate(step) for rate in (self.rate, *(one.rate for one in self.optimizers)))

    @property
    def last_step(self) -> int:
        """Updates after which this start of the run ends."""
        asked = self.cfg.stop_at_step
        return self.num_steps if asked is None else min(self.num_steps, self.next_sync_step(asked))

    @property
    def auxiliary_ranks(self) -> tuple[int, ...]:
        """Ranks that do not run the training loop."""
        strategy = self.components.strategy
        return tuple(task.rank for task in self.tasks if task.is_evaluator or not runs_loop(strategy, task))

    @property
    def has_evaluator(self) -> bool:
        """Whether a task evaluates checkpoints beside the training."""
        return any(task.is_evaluator for task in self.tasks)

    @property
    def replaceable(self) -> tuple[int, ...]:
        """Ranks that are restarted alone when they die."""
        strategy = self.components.strategy
        return tuple(task.rank for task in self.tasks if task.is_evaluator or restarts_alone(strategy, task))

    @property
    def eval_batch_size(self) -> int:
        """Samples per forward pass in evaluation."""
        return self.cfg.eval.batch_size or max(self.batch.micro_size, 256)

    def next_sync_step(self, step: int) -> int:
        """Return the first step >= `step` at which the run may be evaluated, saved and stopped."""
        return next_sync_step(self.components.strategy, step)

    def resolved(self, build: Callable[[], nn.Module]) -> RunPlan:
        """Return the plan with the choices that its strategy makes by the model."""
        strategy = resolve(self.components.strategy, build, self.facts)
        return replace(self, components=replace(self.components, strategy=strategy))

    def summary(self, num_params: int) -> dict[str, str]:
        """Return the effective values for the user, label -> text."""
        full, batch, cfg = self.batch.num_shards(0), self.batch, self.cfg
        factors = f"{full} shards of at most {batch.micro_size}" if full > 1 else "1 shard"
        peak = f"{self.rate.peak:g}"
        if self.rate.peak != self.rate.base:
            scaling = cfg.lr_scaling
            peak += f" ({self.rate.base:g} at {scaling.reference_batch}, {scaling.rule} rule)"
        devices = sorted({task.device.partition(":")[0] for task in self.tasks if not task.is_evaluator})
        warmup = f"{self.rate.warmup_steps} steps from {self.rate.start:g}" if self.rate.warmup_steps else "none"
        rows = {
            "recipe": cfg.recipe,
            "strategy": cfg.strategy["_target_"].rpartition(".")[2],
            "tasks": _roles_text(self.tasks),
            "replicas": f"{self.num_replicas} on {', '.join(devices)}",
            "samples": f"{batch.num_samples:,} for training{_drawn_text(self.components.hooks)}",
            "global batch": f"{batch.global_size} = {factors} on {_counted(self.num_replicas, 'replica')}",
            "steps": f"{self.num_steps:,} ({batch.steps_per_epoch:,} an epoch)",
            "optimizers": ", ".join(one.text for one in self.optimizers) or None,
            "learning rate": ", ".join(f"{one.name} {one.rate.peak:g}" for one in self.optimizers) or peak,
            "warmup": warmup,
            "schedule": cfg.schedule["_target_"].rpartition(".")[2],
            "precision": self.components.precision.value,
            "average": average.name if (average := average_of(cfg)) else None,
            "parameters": f"{num_params:,}",
            "reduce": _reduction(cfg) if self.num_replicas > 1 else None,
            "recomputed": _recomputed(cfg.activation_checkpointing),
            "compiled": None if cfg.compile.mode == "off" else f"{cfg.compile.mode}, {cfg.compile.backend}",
            "not finite": _skips_text(cfg.numerics),
            "reproducible": f"yes, {cfg.numerics.lanes} lanes" if cfg.numerics.reproducible else None,
        }
        return {label: text for label, text in rows.items() if text}


def _roles_text(tasks: Sequence[Task]) -> str | None:
    """Return the number of tasks of each role, if there is more than one role."""
    counts = Counter(task.role for task in tasks)
    return ", ".join(f"{count} {role}" for role, count in counts.items()) if counts.keys() - {"worker"} else None


def _reduction(cfg: RunConfig) -> str | None:
    """Return how gradients are summed over replicas and sent, if the strategy leaves it to the user."""
    chosen = None if cfg.numerics.reproducible else cfg.strategy.get("reduce")
    return chosen and f"{chosen}, compression {cfg.strategy.get('compression', 'none')}"


def _drawn_text(hooks: DataHooks) -> str:
    """Return how samples are drawn, if not each of them once an epoch."""
    if hooks.sampler is None:
        return ""
    return f", drawn by {hooks.sampler.name}: an epoch does not contain every sample exactly once"


def _skips_text(numerics: NumericsConfig) -> str | None:
    """Return what happens to a step that is not finite, if it does not end the run."""
    if numerics.on_nonfinite == "skip":
        share = f"{numerics.max_skipped_share * 100:g} %"
        return f"left out, at most {numerics.max_skips_in_a_row} steps in a row and {share} of all"
    return "trained again from the last checkpoint" if numerics.on_nonfinite == "rollback" else None


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
    parts = build_components(cfg, splits)
    facts = plan_context(cfg, parts, num_gpus=_num_gpus(backend) if num_gpus is None else num_gpus, launch=launch)
    problems = [*strategy_problems(parts.strategy, facts), *parts.strategy.validate(facts)]
    problems += access_problems(parts.strategy, facts)
    if not problems:
        problems += [*_elastic_problems(cfg, parts, facts, backend), *_evaluator_problems(cfg, parts, facts, backend)]
    if problems:
        raise ConfigError(problems)
    parts.refuse_unknown_fields()
    parts.hooks.refuse_misfits(parts.datasets["train"], cache=cfg.loader.cache)
    replicas = parts.strategy.num_replicas(facts)
    batch = _batch_plan(cfg, parts, replicas)
    num_steps = cfg.steps or max(1, round((cfg.epochs or 1) * batch.steps_per_epoch))
    rate_of = partial(learning_rate_of, cfg, batch, num_steps)
    optimizers = planned_optimizers(cfg, parts.schedule, rate_of)
    if found := [*phase_problems(optimizers, parts.objective), *average_problems(cfg, parts.datasets, num_steps)]:
        raise ConfigError(found)
    resolved = replace(
        cfg, batch=replace(cfg.batch, global_size=batch.global_size, micro_size=batch.micro_size, accumulation=None)
    )
    if backend is not None:  # a worker sees only its own GPU
        resolved = replace(resolved, cluster={**cfg.cluster, "num_gpus": facts.num_gpus})
    return RunPlan(
        cfg=resolved,
        components=parts,
        tasks=_with_evaluator(cfg, parts.strategy.tasks(facts)),
        facts=replace(facts, micro_size=batch.micro_size),
        backend=backend,
        num_replicas=replicas,
        batch=batch,
        num_steps=num_steps,
        rate=optimizers[0].rate if optimizers else rate_of(float(cfg.optimizer["lr"]), parts.schedule),
        optimizers=optimizers,
        micro_size_depends_on_replicas=cfg.batch.micro_size is None and not cfg.numerics.reproducible,
    )


def plan_context(cfg: RunConfig, parts: Components, *, num_gpus: int, launch: LaunchEnvironment | None) -> PlanContext:
    """Return what a strategy may judge a config by; the size of a shard is not resolved yet."""
    return PlanContext(
        numerics=parts.numerics,
        num_gpus=num_gpus,
        precision=parts.precision.value,
        optimizer=_class_of(cfg.optimizer),
        optimizers={name: _class_of(optimizer_node(cfg.optimizer, one)) for name, one in cfg.optimizers.items()},
        objective=parts.objective,
        sample=parts.sample,
        collate=parts.hooks.collate_function,
        average=average_of(cfg),
        launch=launch,
    )


def _class_of(node: Mapping[str, Any]) -> type | None:
    """Return the class that a node builds; None if its target is a function."""
    target = resolve_target(node["_target_"])
    return target if isinstance(target, type) else None


def _num_gpus(backend: ProcessBackend | None) -> int:
    return torch.cuda.device_count() if backend is None or backend.num_gpus == "auto" else backend.num_gpus


def _elastic_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    fewest = cfg.elastic.min_replicas
    count = len(parts.strategy.tasks(facts))
    if fewest is None or count == 1:  # the config check has already reported that a single process ignores the key
        return []
    if facts.launch is not None:
        rule = f"has no effect under {facts.launch.kind}, which starts processes again itself: tell it how many."
    elif backend is not None and not backend.elastic:
        rule = f"has no effect: {backend.name} starts all processes or none."
    elif not parts.strategy.traits.elastic:
        rule = "has no effect: this strategy goes on with all its processes or not at all."
    elif fewest > count:
        rule = f"more than the {count} replicas of this run. Use {count} or fewer."
    else:
        return []
    return [Problem(key="elastic.min_replicas", value=fewest, rule=rule)]


def _with_evaluator(cfg: RunConfig, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Add the evaluator of `eval.beside` to the tasks of a strategy, as the last one."""
    return (*tasks, Task(role="evaluator", index=0, rank=len(tasks))) if cfg.eval.beside else tasks


def _evaluator_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    own = any(task.is_evaluator for task in parts.strategy.tasks(facts))
    if not own and not cfg.eval.beside:
        return []
    key = "eval.beside" if not own else "strategy.evaluator" if facts.launch is None else "cluster.evaluator"
    problems = []
    if cfg.eval.beside:
        started = facts.launch.kind if facts.launch is not None else backend.name if backend is not None else None
        reasons = {
            "the strategy has an evaluator of its own. Leave one of them out.": own,
            f"{started} starts the processes. Start the evaluator by hand: "
            "python -m trainkit.run.session.evaluator_main RUN": started is not None,
            "the run may go on with fewer tasks (elastic.min_replicas). Leave one of them out.": (
                cfg.elastic.min_replicas is not None
            ),
        }
        rules = [rule for rule, applies in reasons.items() if applies]
        problems += [Problem(key="eval.beside", value=True, rule=rule) for rule in rules]
    if not validation_splits(parts.datasets):
        problems.append(Problem(key=key, rule="has no validation split to evaluate on: the data has none."))
    for name, node in cfg.callbacks.items():
        if getattr(_class_of(node), "decides_by_figures", False):
            rule = (
                f"goes by evaluations during the training, which {key} leaves to a process of its own. Leave one out."
            )
            problems.append(Problem(key=f"callbacks.{name}", rule=rule))
    return problems


def _batch_plan(cfg: RunConfig, parts: Components, replicas: int) -> BatchPlan:
    sizes = resolve_batch(
        global_size=cfg.batch.global_size,
        micro_size=cfg.batch.micro_size,
        accumulation=cfg.batch.accumulation,
        num_replicas=replicas,
        lanes=cfg.numerics.lanes if cfg.numerics.reproducible else None,
        shards_a_replica=default_shards_per_replica(parts.strategy),
    )
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
    return LearningRate(base=base, peak=peak, start=start, warmup_steps=warmup, num_steps=num_steps, schedule=schedule)


def _recomputed(asked: str | int | Sequence[str]) -> str | None:
    if asked == "none":
        return None
    words = "every block" if isinstance(asked, str) else f"one block in {asked}"
    return words if isinstance(asked, str | int) else f"each {', '.join(asked)}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
