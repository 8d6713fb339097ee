"""`trainkit plan OVERRIDES`: the whole run on one screen, before a process is started or a device is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from trainkit.config.values import MOST_PROCESSES, whole_number
from trainkit.errors import ConfigError, Problem
from trainkit.report.tables import print_rows, print_summary
from trainkit.storage import num_bytes
from trainkit.verbs.support.call import Call, Flag

if TYPE_CHECKING:
    from trainkit.numerics.schedules import LearningRate
    from trainkit.run.planning.memory import Memory
    from trainkit.run.planning.plan import RunPlan
    from trainkit.strategies.base import StagePart

USAGE: Final = "OVERRIDES"
FLAGS: Final[Mapping[str, Flag]] = {"world": Flag(help="plan for a host with this many GPUs", value="N")}


def run(call: Call) -> int:
    """Print the plan; the exit code is 2 where there are problems, as for every verb."""
    call.check_arity()
    world = _world(call.flags.get("world"))
    composition = call.compose()
    from trainkit.api import launch_environment_of  # noqa: PLC0415 - not for --help
    from trainkit.run.planning.memory import memory_of, meta_model  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.misfits import refuse_misfits  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.notes import coupling_of, cut_notes, model_notes  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.plan import make_plan  # noqa: PLC0415 - imports torch
    from trainkit.strategies.capabilities import describe_partition  # noqa: PLC0415 - imports torch

    try:
        plan = make_plan(composition.cfg, num_gpus=world, launch=launch_environment_of(composition.cfg))
        model = meta_model(plan)
        refuse_misfits(plan, model)
        notes = [*model_notes(plan, model, composition.is_given), *cut_notes(plan, lambda: coupling_of(plan, model))]
        plan = plan.resolved(lambda: model)  # resolve `auto` once for all lines of the output
        memory = memory_of(plan, model)
        parts = describe_partition(plan.components.strategy, model, plan.facts)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    rows = {**plan.summary(memory.num_params), **dict(_more(plan)), **dict(_memory(memory))}
    print_summary(f"plan of {plan.cfg.name}", rows, notes=[*composition.notes, *notes])
    if parts:
        print_rows(("stage", "modules", "parameters", "bytes", "device"), map(_part, parts))
    return 0


def _world(text: str | None) -> int | None:
    if text is None:
        return None
    number = whole_number(text, low=0, high=MOST_PROCESSES)
    if number is None:
        rule = f"must be a number of GPUs, {MOST_PROCESSES:,} or less."
        raise ConfigError([Problem(key="--world", value=text, rule=rule, origin="command line")])
    return number


def _more(plan: RunPlan) -> Iterator[tuple[str, str]]:
    devices: dict[str, list[str]] = {}
    for task in plan.tasks:
        devices.setdefault(task.device, []).append(str(task))
    placed = ", ".join(f"{' '.join(tasks)} on {device}" for device, tasks in devices.items())
    yield "tasks", placed if len(plan.tasks) > 1 else f"{placed}, in this process"
    last = plan.batch.batch_size(plan.batch.steps_per_epoch - 1)
    if last < plan.batch.global_size:
        shards = plan.batch.num_shards(plan.batch.steps_per_epoch - 1)
        yield "last batch", f"{last} samples in {shards} shard{'' if shards == 1 else 's'}"
    rates = {f"{one.name} ": one.rate for one in plan.optimizers} or {"": plan.rate}
    yield "rate curve", "; ".join(f"{name}{_curve_text(rate)}" for name, rate in rates.items())


def _curve_text(rate: LearningRate) -> str:
    return ", ".join(f"{value:.3g} at {step:,}" for step, value in _curve(rate))


def _curve(rate: LearningRate) -> list[tuple[int, float]]:
    """Return the learning rate at its corners and quarters."""
    rest = rate.num_steps - rate.warmup_steps
    quarters = [rate.warmup_steps + rest * quarter // 4 for quarter in range(4)]
    steps = sorted({0, max(rate.warmup_steps - 1, 0), *quarters, rate.num_steps - 1})
    return [(step, rate(step)) for step in steps if 0 <= step < rate.num_steps]


def _part(part: StagePart) -> tuple[str, ...]:
    return str(part.stage), part.modules, f"{part.num_params:,}", num_bytes(part.num_bytes), part.device


def _memory(memory: Memory) -> Iterator[tuple[str, str]]:
    optimizer = "unknown" if memory.optimizer_bytes is None else num_bytes(memory.optimizer_bytes)
    held = (
        f"parameters {num_bytes(memory.parameter_bytes)}, buffers {num_bytes(memory.buffer_bytes)}, gradients "
        f"{num_bytes(memory.gradient_bytes)} and copies {num_bytes(memory.exchange_bytes)}, optimizer {optimizer}"
    )
    if memory.gathered_bytes:
        held += f", gathered for a while {num_bytes(memory.gathered_bytes)}"
    if memory.frozen_bytes:
        held += f", frozen models {num_bytes(memory.frozen_bytes)}"
    yield "memory a device", f"{num_bytes(memory.total_bytes)} and activations: {held}"
