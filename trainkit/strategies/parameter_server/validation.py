"""Validate the settings of a parameter server before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext
from trainkit.strategies.core.refusals import no_rollback
from trainkit.strategies.parameter_server.coordinator.update_log import FILE

if TYPE_CHECKING:
    from trainkit.strategies.parameter_server.strategy import ParameterServer

__all__ = ["limits"]


def limits(strategy: ParameterServer, facts: PlanContext) -> list[Problem]:
    """Return every problem of a strategy's fields, with each other and with the context."""
    found = [*_of_launch(strategy, facts)]
    if found:
        return found
    of_mode = _of_async(strategy, facts) if strategy.mode == "async" else _of_sync(strategy, facts)
    rest = (*_of_devices(strategy, facts), *_of_transfer(strategy, facts), *_of_replay(strategy, facts))
    return [*of_mode, *strategy.staleness.problems(), *rest]


def _of_launch(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    """Validate that externally started tasks have the right roles."""
    launch = facts.launch
    if launch is None:
        return
    roles = [task.role for task in launch.tasks]
    missing = [role for role in ("chief", "ps") if role not in roles]
    if missing:
        rule = (
            f"{launch.kind} started no task of the role {' nor '.join(missing)}. Name them all: cluster=spec with "
            "cluster.chief, cluster.worker and cluster.ps, or TF_CONFIG."
        )
        yield Problem(key="strategy", value="parameter_server", rule=rule)
        return
    counts = {"workers": strategy.num_workers(facts), "servers": strategy.num_servers(facts)}
    for key, count in counts.items():
        configured = getattr(strategy, key)
        if configured not in ("auto", count):
            rule = f"but {launch.kind} names {count}{', the chief among them' * (key == 'workers')}. Leave it out."
            yield Problem(key=f"strategy.{key}", value=configured, rule=rule)


def _of_sync(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    workers = strategy.num_workers(facts)
    if strategy.spare_replicas >= workers:
        rule = f"spares are among strategy.workers={workers}, and someone must compute. Use {workers - 1} or less."
        yield Problem(key="strategy.spare_replicas", value=strategy.spare_replicas, rule=rule)
    if strategy.spare_mode != "duplicate" and not strategy.spare_replicas:
        yield _unused_key("spare_mode", strategy.spare_mode, "without strategy.spare_replicas")
    if strategy.spare_mode == "replace" and strategy.spare_replicas:
        yield from no_rollback("with strategy.spare_mode=replace the first shards that come make a step", facts)
    if strategy.spare_mode == "replace" and facts.numerics.reproducible:
        rule = "with strategy.spare_mode=replace, which shards make a step depends on time. Use duplicate, or false."
        yield Problem(key="numerics.reproducible", value=True, rule=rule)
    beside = "with strategy.mode=sync: no gradient is stale there"
    if strategy.staleness.policy != "accept":
        yield _unused_key("staleness.policy", strategy.staleness.policy, beside)
    if strategy.warmup_steps:
        yield _unused_key("warmup_steps", strategy.warmup_steps, beside)


def _of_async(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    beside = "with strategy.mode=async: no step waits for all its gradients there"
    if strategy.spare_replicas:
        yield _unused_key("spare_replicas", strategy.spare_replicas, beside)
    if strategy.spare_mode != "duplicate":
        yield _unused_key("spare_mode", strategy.spare_mode, beside)
    if facts.numerics.reproducible:
        rule = "asynchronous updates come in another order every time. Use strategy.mode=sync, or false."
        yield Problem(key="numerics.reproducible", value=True, rule=rule)
    yield from no_rollback("strategy.mode=async applies gradients as they come", facts)
    if facts.precision == "fp16_mixed":
        rule = "has one loss scale, and gradients under way were computed at several. Use precision=bf16_mixed."
        yield Problem(key="precision", value="fp16_mixed", rule=rule)


def _of_devices(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    """Validate the number of devices per worker."""
    count = strategy.devices_per_worker
    if facts.num_gpus and count > facts.num_gpus:
        rule = f"and this host has {facts.num_gpus} GPUs. Use that many, or fewer."
        yield Problem(key="strategy.devices_per_worker", value=count, rule=rule)
    if count > 1 and strategy.spare_mode == "replace" and strategy.spare_replicas:
        rule = "with strategy.spare_mode=replace, an update is made of single shards. Use duplicate, or 1."
        yield Problem(key="strategy.devices_per_worker", value=count, rule=rule)


def _of_transfer(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    if strategy.transfer != "full" and facts.numerics.reproducible:
        rule = "rounds what travels, and numerics.reproducible promises the bits of one device. Use full, or false."
        yield Problem(key="strategy.transfer", value=strategy.transfer, rule=rule)


def _of_replay(strategy: ParameterServer, facts: PlanContext) -> Iterator[Problem]:
    if strategy.replay is None:
        return
    yield from no_rollback("strategy.replay follows the record of another run", facts)
    if not (Path(strategy.replay).expanduser() / FILE).is_file():
        rule = f"holds no {FILE}. Give the folder of a run with strategy=parameter_server."
        yield Problem(key="strategy.replay", value=strategy.replay, rule=rule)


def _unused_key(key: str, value: Any, why: str) -> Problem:
    return Problem(key=f"strategy.{key}", value=value, rule=f"has no effect {why}. Leave it out.")
