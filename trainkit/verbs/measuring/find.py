"""`trainkit find lr OVERRIDES`, `trainkit find micro_size OVERRIDES`: find the value of a key by measurements."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.verbs.support.call import Add, Call, json_flag, whole
from trainkit.verbs.support.measured import Results, begin, line_printer, measure

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.measuring.range_test import RangeResult
    from trainkit.run.estimates.memory import HostMemory
    from trainkit.run.planning.plan import RunPlan

WORDS: Final = ("lr", "micro_size")
"""Possible values of its argument, for completion."""
_OF_ONE: Final = {"min-lr": "lr", "max-lr": "lr", "rounds": "micro_size"}
"""Flag -> the only argument that takes it."""
_DRAWN: Final = ("points", "steepest", "tenth_of_minimum")
_print_line: Final = line_printer("find")


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    add("--min-lr", metavar="RATE", type=_rate, help="lr: the learning rate of the first step; 1e-7 without it")
    add("--max-lr", metavar="RATE", type=_rate, help="lr: the largest learning rate; 10 without it")
    about = "lr: steps between them, 100 without it; micro_size: measured steps of a turn, about two seconds without it"
    add("--steps", metavar="N", type=whole(1, 100_000), help=about)
    add("--rounds", metavar="N", type=whole(1, 1_000), help="micro_size: turns of each size; 1 without it")
    json_flag(add)
    about = "write the results into this new folder: a JSON file, and the curve of lr as PNG"
    add("--out", metavar="FOLDER", help=about)


def run(call: Call) -> int:
    """Find and print; return 0 if a value can be suggested, else 1."""
    what = " ".join(call.arguments)
    if what not in WORDS:
        rule = f"finds one of {', '.join(WORDS)}: trainkit find {WORDS[0]} OVERRIDES."
        raise ConfigError([Problem(key="find", value=what or MISSING, rule=rule, origin=COMMAND_LINE)])
    point = begin(call, "try every value", _flag_problems(call, what))
    plan = _plan(point, _rate_problems if what == "lr" else lambda _: ())
    find = _find_lr if what == "lr" else _find_micro_size
    return measure(call, f"find_{what}", partial(find, call, point, plan), keeps=False)


def _find_lr(call: Call, point: Composition, plan: RunPlan) -> Results:
    from trainkit.measuring.range_test import range_config, range_test  # noqa: PLC0415 - the same
    from trainkit.measuring.showing import rate_document, rate_lines  # noqa: PLC0415 - imports torch

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
    from trainkit.measuring.searches import overrides_for, search_micro_size  # noqa: PLC0415 - the same
    from trainkit.measuring.showing import size_document, size_lines  # noqa: PLC0415 - imports torch

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
    from trainkit.run.planning.notes import plan_all_points  # noqa: PLC0415 - the same
    from trainkit.run.planning.plan import make_plan  # noqa: PLC0415 - imports torch

    plan_all_points([point])
    plan = make_plan(point.cfg)
    problems = [*problems_of(plan), *_batch_problems(plan)]
    if problems:
        raise point.with_origins(ConfigError(problems))
    return plan


def _batch_problems(plan: RunPlan) -> Iterator[Problem]:
    size, count = plan.batch.global_size, plan.batch.num_samples
    if count < size:
        rule = f"larger than the {count} training samples: no step has that many. Use {count} or less."
        yield Problem(key="batch.global_size", value=size, rule=rule)


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
    from trainkit.run.planning.memory import meta_model  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.notes import coupling_of  # noqa: PLC0415 - the same

    found = coupling_of(plan, meta_model(plan.cfg))
    if found.depends_on_cut:
        return [f"{found.text}: another batch.micro_size is a different training."]
    return [f"coupling: not probed, {found.not_probed}."] if found.not_probed else []


def _host_memory(plan: RunPlan) -> HostMemory | None:
    """Return the memory limit for sizes on the CPU, since too large a size may end other programs; None on other
    devices.
    """
    from trainkit.run.estimates.memory import HostMemory  # noqa: PLC0415 - the same
    from trainkit.run.estimates.this_machine import available_bytes  # noqa: PLC0415 - imports torch

    on_cpu = all(task.device == "cpu" for task in plan.tasks)
    return HostMemory(memory_bytes=available_bytes()) if on_cpu and plan.backend is None else None


def _flag_problems(call: Call, what: str) -> Iterator[Problem]:
    """Yield the problems of the flags together."""
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


def _rate(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ArgumentTypeError("must be a number above 0.")
