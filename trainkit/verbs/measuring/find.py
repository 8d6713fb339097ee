"""`trainkit find lr OVERRIDES`, `trainkit find micro_size OVERRIDES`: find the value of a key by measurements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.measuring.range_test import RangeResult, range_config, range_test
from trainkit.measuring.searches import overrides_for, search_micro_size
from trainkit.measuring.showing import rate_document, rate_lines, size_document, size_lines
from trainkit.run.estimates.memory import HostMemory
from trainkit.run.estimates.this_machine import available_bytes
from trainkit.run.planning.notes import coupling_of, plan_all_points
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.trained.build import meta_model
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.measured import Results, begin, line_printer, measure
from trainkit.verbs.support.table import VERBS

_OF_ONE: Final = {"min-lr": "lr", "max-lr": "lr", "rounds": "micro_size"}
"""Flag -> the only argument that takes it."""
_DRAWN: Final = ("points", "steepest", "tenth_of_minimum")
_print_line: Final = line_printer("find")


def run(call: Call) -> int:
    """Find and print; return 0 if a value can be suggested, else 1."""
    point = begin(call, "try every value", problems(call))
    (what,) = call.arguments
    plan = _plan(point, _rate_problems if what == "lr" else lambda _: ())
    find = _find_lr if what == "lr" else _find_micro_size
    return measure(call, f"find_{what}", partial(find, call, point, plan), keeps=False)


def _find_lr(call: Call, point: Composition, plan: RunPlan) -> Results:
    low, high = _rates(call)
    steps = call.flags.get("steps", 100)
    _print_line(f"{steps} steps from {low:g} to {high:g}, until the loss diverges")
    cfg = range_config(point.cfg, low=low, high=high, steps=steps, peak=plan.rate.peak)
    found = range_test(cfg)
    content = rate_document(
        found,
        command=call.command,
        asked=(low, high, steps),
        global_size=plan.batch.global_size,
        scale=plan.rate.peak / plan.rate.base,
        notes=[*point.notes, *_range_notes(plan, found)],
    )
    return Results(
        content=content,
        lines=rate_lines(found, content),
        picture={"draw": "range", "title": call.command, **{name: content[name] for name in _DRAWN}},
        is_failed=found.curve.steepest is None,
    )


def _find_micro_size(call: Call, point: Composition, plan: RunPlan) -> Results:
    rounds, steps = call.flags.get("rounds", 1), call.flags.get("steps")
    found = search_micro_size(point.cfg, plan, memory=_host_memory(plan), rounds=rounds, steps=steps, log=_print_line)
    overrides = overrides_for(point.cfg, found)
    notes = [*point.notes, *_size_notes(plan)]
    content = size_document(found, command=call.command, rounds=rounds, overrides=overrides, notes=notes)
    return Results(content=content, lines=size_lines(found, overrides), is_failed=found.best is None)


def _plan(point: Composition, problems_of: Any) -> RunPlan:
    """Return the plan of a training that can be measured.

    Raises:
        ConfigError: its problems, those of its plan, or a batch that the data cannot fill.
    """
    plan_all_points([point])
    plan = make_plan(point.cfg)
    wrong, size, count = [*problems_of(plan)], plan.batch.global_size, plan.batch.num_samples
    if count < size:
        rule = f"larger than the {count} training samples: no step has that many. Use {count} or less."
        wrong.append(Problem(key="batch.global_size", value=size, rule=rule))
    if wrong:
        raise point.with_origins(ConfigError(wrong))
    return plan


def _rate_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the reasons why a range test cannot find the learning rate of a training."""
    if plan.optimizers:
        names = ", ".join(one.name for one in plan.optimizers)
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


def _range_notes(plan: RunPlan, found: RangeResult) -> Iterator[str]:
    """Yield notes about a range test."""
    left = "the range replaces the schedule"
    yield f"{left} and the warmup of {plan.rate.warmup_steps} steps." if plan.rate.warmup_steps else f"{left}."
    if found.curve.minimum is not None and found.curve.minimum >= 0.9 * found.curve.points[-1].lr:
        yield "the loss is smallest at the end of the range: the test did not reach its increase."


def _size_notes(plan: RunPlan) -> list[str]:
    """Return a note that the size of a shard changes the training, not only its speed; empty if it does not."""
    found = coupling_of(plan, meta_model(plan.cfg))
    if found.depends_on_cut:
        return [f"{found.text}: another batch.micro_size is a different training."]
    return [f"coupling: not probed, {found.not_probed}."] if found.not_probed else []


def _host_memory(plan: RunPlan) -> HostMemory | None:
    """Return the memory limit for sizes on the CPU, since too large a size may end other programs; None on other
    devices.
    """
    on_cpu = all(task.device == "cpu" for task in plan.tasks)
    return HostMemory(memory_bytes=available_bytes()) if on_cpu and plan.backend is None else None


def problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags together."""
    what, words = " ".join(call.arguments), VERBS["find"].words
    if what not in words:
        rule = f"finds one of {', '.join(words)}: trainkit find {words[0]} OVERRIDES."
        yield Problem(key="find", value=what or MISSING, rule=rule, origin=COMMAND_LINE)
        return
    for name in call.flags:
        if _OF_ONE.get(name, what) != what:
            yield call.problem(name, f"has no effect with find {what}.")
    low, high = _rates(call)
    if what == "lr" and low >= high:
        name = "max-lr" if "max-lr" in call.flags else "min-lr"
        yield call.problem(name, f"must leave a range: it would go from {low:g} to {high:g}.")
    if what == "lr" and call.flags.get("steps", 10) < 10:
        yield call.problem("steps", "must be a whole number, 10 to 100,000.")


def _rates(call: Call) -> tuple[float, float]:
    return call.flags.get("min-lr", 1e-7), call.flags.get("max-lr", 10.0)
