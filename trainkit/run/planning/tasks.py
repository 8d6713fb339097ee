"""Refuse tasks that a run cannot have in addition to those of its strategy, and elasticity that it does not support."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

from trainkit.cluster.host import VISIBLE, mig_instances
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, class_built_by
from trainkit.data.splits import validation_splits
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.build import Components
from trainkit.run.process_backend import ProcessBackend
from trainkit.strategies.base import PlanContext, Strategy

_EVALUATOR: Final = "trainkit.run.session.evaluator_main"


def refuse_launch(cfg: RunConfig, launch: LaunchEnvironment) -> None:
    """Refuse a launch whose tasks the strategy cannot use: in each process, before it waits for the others.

    Raises:
        ConfigError: the strategy has no such roles, or needs other numbers of tasks.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    if problems := [*strategy.launch_problems(launch.training), *_missing_evaluator(strategy, launch)]:
        raise ConfigError(problems)


def _missing_evaluator(strategy: Strategy, launch: LaunchEnvironment | None) -> list[Problem]:
    """Return the problem of an evaluator that the strategy asks for, and that the launch does not start."""
    asked = any(task.is_evaluator for task in strategy.tasks(PlanContext()))
    if launch is None or launch.has_evaluator or not asked:
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
    found = _elastic_problems(cfg, parts, facts, backend) if cfg.elastic.min_replicas is not None else []
    found += _mig_problems(parts, facts) if backend is None and facts.num_gpus > 1 else []
    named = launch is not None and launch.has_evaluator
    own = any(task.is_evaluator for task in parts.strategy.tasks(replace(facts, launch=None)))
    if cfg.eval.beside or own or named:
        found += _evaluator_problems(cfg, parts, launch, backend, own=own)
    return found


def _elastic_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    """Return why the run cannot continue with fewer tasks, as `elastic.min_replicas` asks."""
    fewest = cfg.elastic.min_replicas
    count = len(parts.strategy.tasks(facts))
    if fewest is None or count == 1:  # the config check has already reported that a single process ignores the key
        return []
    if facts.launch is not None:
        rule = f"has no effect under {facts.launch.kind}, which restarts processes itself: set the number there."
    elif backend is not None and not backend.elastic:
        rule = f"has no effect: {backend.name} starts all processes or none."
    elif not parts.strategy.facts_in(facts).elastic:
        rule = "has no effect: this strategy needs all its processes."
    elif fewest > count:
        rule = f"more than the {count} replicas of this run. Use {count} or fewer."
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


def with_evaluator(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Add the evaluator of a launch or of `eval.beside` to the tasks of a strategy, as the last one."""
    return (*tasks, Task(role="evaluator", index=0, rank=len(tasks)))


def _evaluator_problems(
    cfg: RunConfig, parts: Components, launch: LaunchEnvironment | None, backend: ProcessBackend | None, *, own: bool
) -> list[Problem]:
    """Return why the run cannot have an evaluator: that of the strategy (`own`), of the launch, or of `eval.beside`."""
    named = launch is not None and launch.has_evaluator
    key = "cluster.evaluator" if named else "strategy.evaluator" if own else "eval.beside"
    started = launch.kind if launch is not None else backend.name if backend is not None else None
    unstarted = f"{started} starts the processes. Start the evaluator by hand: python -m {_EVALUATOR} RUN"
    rules = {
        "the strategy has its own evaluator. Leave one of them out.": own,
        "the cluster has an evaluator. Leave one of them out.": named and not own,
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
