"""Refuse tasks that a run cannot have in addition to those of its strategy, and elasticity that it does not support."""

from __future__ import annotations

import os

from trainkit.cluster.host import VISIBLE, mig_instances
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import class_built_by
from trainkit.data.splits import validation_splits
from trainkit.errors import Problem
from trainkit.run.planning.build import Components
from trainkit.run.process_backend import ProcessBackend
from trainkit.strategies.base import PlanContext
from trainkit.strategies.memory_capabilities import num_slots


def task_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    """Return why a run cannot have its tasks, its evaluator, or fewer tasks later.

    Args:
        cfg: a checked config.
        parts: the objects of the training; the strategy accepts `facts`.
        facts: the context of the plan.
        backend: starts the processes; None: this machine does.
    """
    found = _elastic_problems(cfg, parts, facts, backend) if cfg.elastic.min_replicas is not None else []
    found += _mig_problems(parts, facts) if backend is None and facts.num_gpus > 1 else []
    if cfg.eval.beside or any(task.is_evaluator for task in parts.strategy.tasks(facts)):
        found += _evaluator_problems(cfg, parts, facts, backend)
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
    elif not parts.strategy.traits.elastic:
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
    if not alone and num_slots(parts.strategy, facts.num_gpus) <= len(tasks):
        return []
    rule = f"a process uses one MIG instance, and {VISIBLE} names {len(names)}. Name one, or use one per process."
    return [Problem(key="strategy", rule=rule)]


def with_evaluator(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Add the evaluator of `eval.beside` to the tasks of a strategy, as the last one."""
    return (*tasks, Task(role="evaluator", index=0, rank=len(tasks)))


def _evaluator_problems(
    cfg: RunConfig, parts: Components, facts: PlanContext, backend: ProcessBackend | None
) -> list[Problem]:
    """Return why the run cannot have an evaluator: that of the strategy, or the one of `eval.beside`."""
    own = any(task.is_evaluator for task in parts.strategy.tasks(facts))
    key = "eval.beside" if not own else "strategy.evaluator" if facts.launch is None else "cluster.evaluator"
    problems = []
    if cfg.eval.beside:
        started = facts.launch.kind if facts.launch is not None else backend.name if backend is not None else None
        rules = []
        if own:
            rules.append("the strategy has its own evaluator. Leave one of them out.")
        if started is not None:
            by_hand = "Start the evaluator by hand: python -m trainkit.run.session.evaluator_main RUN"
            rules.append(f"{started} starts the processes. {by_hand}")
        if cfg.elastic.min_replicas is not None:
            rules.append("the run may continue with fewer tasks (elastic.min_replicas). Leave one of them out.")
        problems += [Problem(key="eval.beside", value=True, rule=rule) for rule in rules]
    if not validation_splits(parts.datasets):
        problems.append(Problem(key=key, rule="has no validation split to evaluate on: the data has none."))
    for name, node in cfg.callbacks.items():
        if getattr(class_built_by(node), "decides_by_figures", False):
            rule = f"needs evaluations during the training, which {key} moves to a separate process. Leave one out."
            problems.append(Problem(key=f"callbacks.{name}", rule=rule))
    return problems
