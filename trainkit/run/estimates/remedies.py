"""Changes of a config that make a run fit into the memory of its devices, each planned, with its price."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError
from trainkit.report.schemas.planning import PlannedRemedy
from trainkit.run.estimates.hardware import Hardware
from trainkit.run.estimates.memory import DeviceMemory, device_memory
from trainkit.run.estimates.passes import evaluated_samples
from trainkit.run.estimates.verdict import HostMemory, verdict_of
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.shipped import shipped_strategies

MOST: Final = 3
"""Number of remedies."""
_ENOUGH_S: Final = 3.0
"""Time for planning changes after an error: the other ranks wait for its text. Those of later kinds are not named."""
_OF_A_PROCESS: Final = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
"""Limits of the memory of a process; -1 is none."""
_ANOTHER: Final = "another training"


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change that is legal for a config."""

    overrides: str
    price: str
    cfg: RunConfig


_Kind = Callable[[RunPlan, nn.Module], Iterator[_Change]]
"""Function that yields the changes of one kind, the cheapest first."""


def remedies_for(plan: RunPlan, model: nn.Module, hardware: Hardware) -> list[PlannedRemedy]:
    """Return the cheapest changes with which a run fits, at most three.

    If only an evaluation does not fit, its batches become smaller. Otherwise each kind of change is tried alone, in the
    order of its price; if fewer than three fit, the kinds are also combined, from the cheapest on. Every change is
    planned like the run itself. If none fits, the closest one is returned.

    Args:
        plan: the plan of a run that does not fit.
        model: the model, with or without data; unchanged.
        hardware: the hardware that it must fit.
    """
    if verdict_of(plan, device_memory(plan, model, evaluates=False), hardware).fits:
        smaller = _cheapest(_smaller_evaluations, plan, model, hardware, evaluates=True)
        if smaller is not None and smaller[0].fits:
            return [smaller[0]]
    found: list[PlannedRemedy] = []
    for kind in _KINDS:
        alone = _cheapest(kind, plan, model, hardware)
        if alone is not None:
            found.append(_with_evaluations(*alone, model, hardware))
    fitting = [one for one in found if one.fits]
    if len(fitting) < MOST:
        joined = _joined(plan, model, hardware)
        known = {one.overrides for one in found}
        found += [one for one in joined if one.overrides not in known]
        fitting = [one for one in found if one.fits]
    return fitting[:MOST] or sorted(found, key=lambda one: one.needs)[:1]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change that a run out of memory does not use yet."""

    overrides: str
    """Arguments to add to the command line."""
    price: str
    """Cost of the change, in words."""
    saved: int
    """Bytes that the run then needs less, of the memory that ran out."""


def largest_savings(plan: RunPlan, model: nn.Module, *, placing: bool) -> list[Saving]:
    """Return the changes that save the most memory of a run that is out of memory, at most three, the largest first.

    Each change is planned like the run itself; those that it would refuse are left out. Changes that make another
    training come last.

    Args:
        plan: the plan of the run that is out of memory.
        model: the model without data; unchanged.
        placing: whether the memory ran out before the first step, where activations and checkpoints do not count.
    """
    # On the CPU all tasks of a host share its memory, so that a model cut over them needs no less, unless each process
    # has a limit of its own (ulimit -d, -v).
    on_host = plan.tasks[0].device == "cpu" and not any(resource.getrlimit(kind)[0] > 0 for kind in _OF_A_PROCESS)
    memory = HostMemory(memory_bytes=0, whole_host=on_host)

    def needs(other: RunPlan) -> int:
        found = device_memory(other, model, evaluates=False)
        if placing:
            held = replace(found.held, staging_bytes=0)
            found = DeviceMemory(held=held, part=found.part)
        return verdict_of(other, found, memory).needs

    before, count = needs(plan), plan.context.num_gpus or 4
    savings: list[Saving] = []
    until = time.monotonic() + (_ENOUGH_S if len(plan.tasks) > 1 else math.inf)
    # what can save most comes first, in case that the time is too short for all
    for kind in sorted(_KINDS, key=lambda kind: kind is not _sharded):
        if time.monotonic() > until:
            break
        for change in kind(plan, model) if kind is not _sharded else _sharded_over(plan, count):
            other = planned_anew(plan, change.cfg, launch=plan.context.launch)
            if other is None:
                continue
            savings.append(Saving(overrides=change.overrides, price=change.price, saved=before - needs(other)))
            if kind is not _sharded:
                break
    useful = [one for one in savings if one.saved > 0]
    return sorted(useful, key=lambda one: (one.price.startswith(_ANOTHER), -one.saved))[:MOST]


def _joined(plan: RunPlan, model: nn.Module, hardware: Hardware) -> list[PlannedRemedy]:
    """Return combinations of changes: each kind added to the earlier kinds that help."""
    found: list[PlannedRemedy] = []
    overrides, prices, current = "", "", plan
    needs = verdict_of(plan, device_memory(plan, model, evaluates=False), hardware).needs
    for kind in _KINDS:
        step = _cheapest(kind, current, model, hardware)
        if step is None or step[0].needs >= needs:
            continue
        one, current = step
        needs = one.needs
        overrides, prices = f"{overrides} {one.overrides}".strip(), f"{prices}; {one.price}".strip("; ")
        whole = replace(one, overrides=_last_of_each(overrides), price=prices)
        found.append(_with_evaluations(whole, current, model, hardware))
        if one.fits:
            break
    return found


def _with_evaluations(one: PlannedRemedy, plan: RunPlan, model: nn.Module, hardware: Hardware) -> PlannedRemedy:
    """Return a change that is planned for steps alone, with the memory of evaluations, and with smaller batches of them
    if they do not fit.
    """
    verdict = verdict_of(plan, device_memory(plan, model), hardware)
    whole = replace(one, needs=verdict.needs, fits=verdict.fits is True)
    if whole.fits or not one.fits:
        return whole
    smaller = _cheapest(_smaller_evaluations, plan, model, hardware, evaluates=True)
    if smaller is None:
        return whole
    more = smaller[0]
    return replace(more, overrides=f"{one.overrides} {more.overrides}", price=f"{one.price}; {more.price}")


def _last_of_each(overrides: str) -> str:
    """Return overrides in which each key occurs once, with its last value."""
    return " ".join({word.partition("=")[0]: word for word in overrides.split()}.values())


def _cheapest(
    kind: _Kind, plan: RunPlan, model: nn.Module, hardware: Hardware, *, evaluates: bool = False
) -> tuple[PlannedRemedy, RunPlan] | None:
    """Return the first change of a kind with which the steps fit, else the one whose steps need the least memory; None
    if there is none. Evaluations count with `evaluates`.
    """
    best: tuple[PlannedRemedy, RunPlan] | None = None
    for change in kind(plan, model):
        other = planned_anew(plan, change.cfg, launch=plan.context.launch)
        if other is None:
            continue
        verdict = verdict_of(other, device_memory(other, model, evaluates=evaluates), hardware)
        fits = verdict.fits is True
        one = PlannedRemedy(overrides=change.overrides, price=change.price, needs=verdict.needs, fits=fits)
        if best is None or one.needs < best[0].needs:
            best = one, other
        if fits:
            break
    return best


def _smaller_evaluations(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    size = evaluated_samples(plan)
    while size > 1:
        size = (size + 1) // 2
        cfg = replace(plan.cfg, eval=replace(plan.cfg.eval, batch_size=size))
        yield _Change(overrides=f"eval.batch_size={size}", price="more batches in an evaluation", cfg=cfg)


def _smaller_shards(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    size = plan.batch.micro_size
    while size > 1:
        size = (size + 1) // 2
        count = -(-plan.batch.global_size // size)
        price = f"{count} shards a step, each of less work for the device"
        overrides, cfg = with_shards_of(plan, size)
        yield _Change(overrides=overrides, price=price, cfg=cfg)


def _without_copy(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    if plan.cfg.checkpoint.background:
        cfg = replace(plan.cfg, checkpoint=replace(plan.cfg.checkpoint, background=False))
        yield _Change(overrides="checkpoint.background=false", price="steps wait for each checkpoint", cfg=cfg)


def _recomputed(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    if plan.cfg.activation_checkpointing != "full":
        cfg = replace(plan.cfg, activation_checkpointing="full")
        price = "each block is computed twice: a third more work"
        yield _Change(overrides="activation_checkpointing=full", price=price, cfg=cfg)


def _sharded(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    for count in (2, 4, 8, 16, 32, 64):
        if count > max(plan.context.num_gpus, 4):
            return
        yield from _sharded_over(plan, count)


def _sharded_over(plan: RunPlan, count: int) -> Iterator[_Change]:
    for overrides, cfg in sharding_choices(plan, count):
        price = f"{count} devices, which exchange parameters or activations in every step"
        yield _Change(overrides=overrides, price=price, cfg=cfg)


def _narrower(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    narrower = plan.components.precision.narrower
    if narrower is not None:
        cfg = replace(plan.cfg, precision={**plan.cfg.precision, "value": narrower})
        price = "other rounding: compare the results"
        yield _Change(overrides=f"precision={narrower}", price=price, cfg=cfg)


def _leaner_optimizer(plan: RunPlan, _: nn.Module) -> Iterator[_Change]:
    if plan.optimizers or plan.cfg.optimizer.get("momentum") == 0.0:
        return
    node: dict[str, Any] = {
        "_target_": "torch.optim.SGD", "lr": plan.cfg.optimizer["lr"], "momentum": 0.0, "fused": True,
    }  # fmt: skip
    cfg = replace(plan.cfg, optimizer=node)
    price = f"{_ANOTHER}, without momentum: it needs another learning rate"
    yield _Change(overrides="optimizer=sgd", price=price, cfg=cfg)


_KINDS: Final[tuple[_Kind, ...]] = (_smaller_shards, _without_copy, _recomputed, _sharded, _narrower, _leaner_optimizer)
"""Kinds of changes from the cheapest on: the same training in other pieces, more work, more devices, other rounding,
another training.
"""


def sharding_choices(plan: RunPlan, count: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield the strategies that shard the model over several devices: overrides, and the config with them.

    Args:
        plan: a run; if its model is sharded already, there are none.
        count: number of devices.
    """
    if count < 2 or plan.components.strategy.facts_in(plan.context).is_sharded:
        return
    for name, target, kind in shipped_strategies():
        keys = kind.sharded_over(count)
        if not keys:
            continue
        cfg, more = _with_shards_for_all(plan, {TARGET: target, **keys})
        given = " ".join(f"strategy.{key}={value}" for key, value in keys.items())
        yield f"strategy={name} {given}{more}", cfg


def _with_shards_for_all(plan: RunPlan, node: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the config with another strategy and a shard for each replica, and the override that this needs."""
    cfg = replace(plan.cfg, strategy=dict(node))
    replicas = build(node, "strategy").num_replicas(plan.context)
    if replicas == 1:
        return cfg, ""
    if plan.micro_size_depends_on_replicas:
        return replace(cfg, batch=plan.given), ""
    micro = min(plan.batch.micro_size, max(plan.batch.global_size // replicas, 1))
    if micro == plan.batch.micro_size and plan.given.global_size == plan.batch.global_size:
        return cfg, ""
    overrides, cut = with_shards_of(plan, micro)
    return replace(cut, strategy=cfg.strategy), f" {overrides}"


def with_shards_of(plan: RunPlan, size: int) -> tuple[str, RunConfig]:
    """Return the overrides, and the config with them, that cut the steps of a run into shards of this size."""
    cfg = replace(plan.cfg, batch=replace(plan.cfg.batch, micro_size=size))
    return " ".join(plan.given.overrides(global_size=plan.batch.global_size, micro_size=size)), cfg


def planned_anew(plan: RunPlan, cfg: RunConfig, *, launch: LaunchEnvironment | None = None) -> RunPlan | None:
    """Return the plan of another config on the same devices; None if a run refuses it.

    Args:
        plan: a run.
        cfg: another config for its data.
        launch: the external launch of its processes.
    """
    try:
        other = make_plan(cfg, num_gpus=plan.context.num_gpus, launch=launch, splits=plan.components.datasets)
        model = meta_model(other.cfg)
        model_notes(other, model)  # raises what the run itself would raise
        return replace(other.resolved(lambda: model), given=plan.given)
    except ConfigError:
        return None
