"""`trainkit find lr OVERRIDES`, `trainkit find micro_size OVERRIDES`: find the value of a key by measurements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.measuring.range_test import FindLrDocument, SuggestedRate, range_config, range_test
from trainkit.measuring.searches import FindMicroSizeDocument, best_of, search_micro_size
from trainkit.measuring.tables import header, machine
from trainkit.run.estimates.memory import HostMemory
from trainkit.run.estimates.this_machine import available_bytes
from trainkit.run.planning.notes import coupling_of, plan_all_points
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.trained.build import meta_model
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.measured import Results, begin, line_printer, measure
from trainkit.verbs.support.table import VERBS

_ARGUMENT_OF: Final = {"min-lr": "lr", "max-lr": "lr", "rounds": "micro_size"}
"""Flag -> the only argument that takes it."""
_print_line: Final = line_printer("find")


def run(call: Call) -> int:
    """Find and print; return 0 if a value can be suggested, else 1."""
    point = begin(call, "try every value", problems(call))
    (key,) = call.arguments
    plan_all_points([point])
    plan = make_plan(point.cfg)
    size, count = plan.batch.global_size, plan.batch.num_samples
    wrong = [*(_rate_problems(plan) if key == "lr" else ())]
    if count < size:
        rule = f"larger than the {count} training samples: no step has that many. Use {count} or less."
        wrong.append(Problem(key="batch.global_size", value=size, rule=rule))
    if wrong:
        raise point.with_origins(ConfigError(wrong))
    find = _find_lr if key == "lr" else _find_micro_size
    return measure(call, f"find_{key}", partial(find, call, point, plan), keeps=False)


def _find_lr(call: Call, point: Composition, plan: RunPlan) -> Results:
    (low, high), steps, rate = _rates(call), call.flags.get("steps", 100), plan.rate
    _print_line(f"{steps} steps from {low:g} to {high:g}, until the loss diverges")
    curve = range_test(range_config(point.cfg, low=low, high=high, steps=steps, peak=rate.peak))
    warmup = f" and the warmup of {rate.warmup_steps} steps" if rate.warmup_steps else ""
    notes = [*point.notes, f"the range replaces the schedule{warmup}."]
    if curve.minimum is not None and curve.minimum >= 0.9 * curve.points[-1].lr:
        notes.append("the loss is smallest at the end of the range: the test did not reach its increase.")
    content = FindLrDocument(
        **header(call.command),
        global_size=plan.batch.global_size,
        min_lr=low,
        max_lr=high,
        steps=steps,
        ended=curve.ended,
        steepest=SuggestedRate.of(curve.steepest, rate.peak / rate.base),
        tenth_of_minimum=SuggestedRate.of(curve.tenth_of_minimum, rate.peak / rate.base),
        points=curve.points,
        notes=notes,
    )
    drawn = ("points", "steepest", "tenth_of_minimum")
    return Results(
        content=content, lines=content.lines(), picture="range", title=call.command, drawn=drawn,
        is_failed=curve.steepest is None,
    )  # fmt: skip


def _find_micro_size(call: Call, point: Composition, plan: RunPlan) -> Results:
    rounds, steps = call.flags.get("rounds", 1), call.flags.get("steps")
    # Too large a size on the CPU may end other programs.
    on_cpu = plan.backend is None and all(task.device == "cpu" for task in plan.tasks)
    memory = HostMemory(memory_bytes=available_bytes()) if on_cpu else None
    sizes = search_micro_size(point.cfg, plan, memory=memory, rounds=rounds, steps=steps, log=_print_line)
    coupling, notes, best = coupling_of(plan, meta_model(plan.cfg)), list(point.notes), best_of(sizes)
    if coupling.depends_on_cut:
        notes.append(f"{coupling.text}: another batch.micro_size is a different training.")
    elif coupling.not_probed:
        notes.append(f"coupling: not probed, {coupling.not_probed}.")
    batch, total = point.cfg.batch, plan.batch.global_size
    content = FindMicroSizeDocument(
        **header(call.command),
        machine=machine(),
        global_size=total,
        replicas=plan.num_replicas,
        rounds=rounds,
        sizes=sizes,
        micro_size=best.micro_size if best else None,
        overrides=[*batch.overrides(global_size=total, micro_size=best.micro_size)] if best else [],
        notes=notes,
    )
    return Results(content=content, lines=content.lines(), is_failed=best is None)


def _rate_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the reasons why a range test cannot find the learning rate of a training."""
    if plan.optimizers:
        names = ", ".join(optimizer.name for optimizer in plan.optimizers)
        rule = f"has a learning rate for each of {names}, and the test changes only one. Use bench --until for each."
        yield Problem(key="optimizers", rule=rule)
    elif plan.rate.peak <= 0:
        yield Problem(key="optimizer.lr", value=plan.rate.base, rule="must be above 0: the test multiplies it.")
    if plan.components.strategy.facts_in(plan.context).is_asynchronous:
        rule = (
            "applies gradients as they arrive, so no loss belongs to the learning rate of its step. Find the rate "
            "under strategy=one_device, or strategy.mode=sync."
        )
        yield Problem(key="strategy.mode", value="async", rule=rule)


def problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags together."""
    key, words = " ".join(call.arguments), VERBS["find"].words
    if key not in words:
        rule = f"finds one of {', '.join(words)}: trainkit find {words[0]} OVERRIDES."
        yield Problem(key="find", value=key or MISSING, rule=rule, origin=COMMAND_LINE)
        return
    for name in call.flags:
        if _ARGUMENT_OF.get(name, key) != key:
            yield call.problem(name, f"has no effect with find {key}.")
    low, high = _rates(call)
    if key == "lr" and low >= high:
        name = "max-lr" if "max-lr" in call.flags else "min-lr"
        yield call.problem(name, f"must leave a range: it would go from {low:g} to {high:g}.")
    if key == "lr" and call.flags.get("steps", 10) < 10:
        yield call.problem("steps", "must be a whole number, 10 to 100,000.")


def _rates(call: Call) -> tuple[float, float]:
    return call.flags.get("min-lr", 1e-7), call.flags.get("max-lr", 10.0)
