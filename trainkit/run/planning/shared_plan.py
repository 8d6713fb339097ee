"""Send the plan of a run from the process that resolved it to the ranks, which then build the components only.

A rank that another program or user starts receives no plan, and makes its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from trainkit.bounded import parse_json
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.data.splits import size_of
from trainkit.errors import DataError, TrainkitError
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.schedules import LearningRate
from trainkit.run.planning.build import Components, build_components
from trainkit.run.planning.optimizers import planned_optimizers
from trainkit.run.planning.plan import RunPlan, learning_rate_of, plan_context

VARIABLE: Final = "TRAINKIT_PLAN"
"""Environment variable that holds, as JSON, what the plan of a worker's run resolves and `resolved.yaml` lacks."""


def plan_to_environ(plan: RunPlan) -> dict[str, str]:
    """Return the environment variable that `plan_from_environ` reads in a rank."""
    launch = plan.facts.launch
    values = {
        "tasks": [asdict(task) for task in plan.tasks],
        "launch": None if launch is None else asdict(launch),
        "num_gpus": plan.facts.num_gpus,
        "num_replicas": plan.num_replicas,
        "num_samples": plan.batch.num_samples,
        "num_steps": plan.num_steps,
        "rate": {name: getattr(plan.rate, name) for name in ("base", "peak", "start", "warmup_steps", "num_steps")},
        "micro_size_depends_on_replicas": plan.micro_size_depends_on_replicas,
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
        plan = _plan(cfg, parts, parse_json(text))
    except (ValueError, TypeError, KeyError) as error:
        raise TrainkitError(f"{VARIABLE} holds no plan: {error}") from error
    num_samples = size_of(parts.datasets["train"])
    if num_samples != plan.batch.num_samples:
        raise DataError(
            f"the training data has {num_samples} samples in this process, and {plan.batch.num_samples} in the process "
            "that planned the run."
        )
    return plan


def _plan(cfg: RunConfig, parts: Components, values: Mapping[str, Any]) -> RunPlan:
    launch, batch = values["launch"], cfg.batch
    if batch.global_size is None or batch.micro_size is None:
        raise ValueError("the config leaves the size of a shard open")
    facts = plan_context(cfg, parts, num_gpus=values["num_gpus"], launch=None if launch is None else _launch(launch))
    plan = BatchPlan(
        num_samples=values["num_samples"],
        global_size=batch.global_size,
        micro_size=batch.micro_size,
        drop_last=batch.drop_last,
    )
    num_steps: int = values["num_steps"]
    optimizers = planned_optimizers(cfg, parts.schedule, partial(learning_rate_of, cfg, plan, num_steps))
    rate = LearningRate(**{**values["rate"], "schedule": parts.schedule})
    return RunPlan(
        cfg=cfg,
        components=parts,
        tasks=tuple(Task(**task) for task in values["tasks"]),
        facts=replace(facts, micro_size=batch.micro_size),
        num_replicas=values["num_replicas"],
        batch=plan,
        num_steps=num_steps,
        optimizers=optimizers,
        rate=optimizers[0].rate if optimizers else rate,
        micro_size_depends_on_replicas=values["micro_size_depends_on_replicas"],
    )


def _launch(values: Mapping[str, Any]) -> LaunchEnvironment:
    tasks = tuple(Task(**task) for task in values["tasks"])
    host, port = values["store"]
    return LaunchEnvironment(
        **{**values, "tasks": tasks, "store": (host, port), "addresses": tuple(values["addresses"])}
    )
