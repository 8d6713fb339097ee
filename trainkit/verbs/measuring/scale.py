"""`trainkit scale OVERRIDES --to-replicas 64`: predict the speedup of more replicas, and from which number on it is too
small.

It measures a few replicas, fits a model, and predicts the others; with `--simulate` it measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import ConfigError, Problem
from trainkit.verbs.support.call import Add, Call, json_flag, whole
from trainkit.verbs.support.measured import Results, begin, line_printer, measure

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.measuring.replicas import Scalable
    from trainkit.run.estimates.hardware import Hardware
    from trainkit.scaling.inputs import Origin

_MEASURING: Final = ("rounds", "steps", "out")
_DRAWN: Final = ("predictions", "checks", "knee")
_print_line: Final = line_printer("scale")


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    add("--to-replicas", metavar="N", type=whole(1, 10_000), help="the largest number of replicas")
    about = "measure nothing: predict from assumptions, with spares and checkpoints"
    add("--simulate", action="store_true", help=about)
    add("--assume", metavar="NAME=VALUE,...", help="inputs that are not measured, such as gbit=100,price_h=2.5")
    add("--seed", metavar="N", type=whole(0, 2**32 - 1), help="seed of the intervals; 0 without it")
    add("--rounds", metavar="N", type=whole(1, 1_000), help="turns of each measurement; 2 without it")
    about = "measured steps of a turn; without it, those of two seconds"
    add("--steps", metavar="N", type=whole(1, 100_000), help=about)
    json_flag(add)
    add("--out", metavar="FOLDER", help="folder of scale.json and scale.png; without it, a new one below outputs/scale")


def run(call: Call) -> int:
    """Print the predictions for more replicas; return 1 if a measurement failed."""
    from trainkit.scaling.inputs import HOSTS, SIMULATED, assumed, parse_assumptions  # noqa: PLC0415 - imports numpy

    simulates, given, problems = "simulate" in call.flags, dict[str, float](), list(_problems(call))
    try:
        given = parse_assumptions(call.flags.get("assume"), SIMULATED if simulates else HOSTS)
    except ConfigError as error:
        problems += error.problems
    if not simulates:
        composition = begin(call, "measure", problems)
        what = _scalable(composition, call.flags["to-replicas"])
        return measure(call, "scale", partial(_measured, call, composition, what, given))
    if problems:
        raise ConfigError(problems)
    target, seed = call.flags["to-replicas"], call.flags.get("seed", 0)
    from trainkit.scaling.answers import scale_lines, simulated_document  # noqa: PLC0415 - imports torch

    found = simulated_document(assumed(SIMULATED, {"given": given}), target, seed=seed)
    lines = scale_lines(found, f"prediction for {target:,} replicas, without a measurement")
    return measure(call, "scale", lambda: Results(content=asdict(found), lines=lines), keeps=False)


def _measured(call: Call, composition: Composition, what: Scalable, given: Mapping[str, float]) -> Results | None:
    """Measure a few replicas, and fit the model to them; None if a measurement failed."""
    from trainkit.measuring.replicas import fitted, measured_shares  # noqa: PLC0415 - imports torch
    from trainkit.measuring.replicas import measure as measure_replicas  # noqa: PLC0415 - the same
    from trainkit.run.estimates.hardware import hardware_of  # noqa: PLC0415 - imports torch
    from trainkit.scaling.answers import scale_document, scale_lines  # noqa: PLC0415 - the same
    from trainkit.scaling.inputs import HOSTS, assumed, link_of  # noqa: PLC0415 - imports numpy

    target, hardware = call.flags["to-replicas"], hardware_of(composition.cfg, _print_line)
    known: dict[Origin, Mapping[str, float]] = {}
    if not what.on_cpu:
        known["measured"] = {"per_host": float(what.plan.context.num_gpus)}
    if hardware is not None:
        link, price = hardware.between_hosts, hardware.price_usd_h
        links = {"gbit": link.gb_s * 8, "latency_us": link.latency_us}
        known["hardware"] = links if price is None else {**links, "price_h": price}
    inputs = assumed(HOSTS, {**known, "given": given})
    values = {name: one.value for name, one in inputs.items()}
    batch, strategy = what.plan.batch.global_size, composition.choices.get("strategy")
    rounds, steps = call.flags.get("rounds", 2), call.flags.get("steps")
    measured = measure_replicas(what, target, rounds=rounds, steps=steps, log=_print_line)
    if measured.failures:
        sys.stderr.write("".join(f"scale: failed: {line}\n" for line in measured.failures))
        return None
    fit = fitted(what, measured, None if hardware is None else hardware.within_host)
    found = scale_document(
        fit.on_hosts(int(values["per_host"]) or None, link_of(values)),
        target,
        inputs,
        what.at(2).remedies,
        seed=call.flags.get("seed", 0),
        measured=measured_shares(measured),
        has_tables=what.has_tables,
        on_cpu=what.on_cpu,
        notes=[*composition.notes, *_notes(what, values, hardware, is_checked=bool(fit.checks))],
    )
    title = f"scale of {what.plan.cfg.name}: strategy={strategy}, batch.global_size={batch}"
    content, num_servers = asdict(found), what.at(2).remedies.num_servers
    return Results(
        content=content,
        lines=scale_lines(found, title, num_servers=num_servers),
        picture={"draw": "scale", "title": title, **{name: content[name] for name in _DRAWN}},
    )


def _notes(
    what: Scalable, values: Mapping[str, float], hardware: Hardware | None, *, is_checked: bool
) -> Iterator[str]:
    if hardware is not None:
        yield f"links and price are those of {hardware.name}; compute times were measured on this machine."
    if what.on_cpu and not values["per_host"]:
        yield f"all replicas share the {what.cores} cores of this host; --assume per_host=1 assumes a host each."
    if not is_checked:
        yield "this machine measures only one replica: the exchange is assumed, and the model is not checked."
    if not values["price_h"]:
        yield "costs are left out: give hardware=NAME, or --assume price_h=2.5."


def _scalable(composition: Composition, target: int) -> Scalable:
    """Plan the training.

    Raises:
        ConfigError: its problems, a strategy without other numbers of replicas, or more replicas than samples.
    """
    from trainkit.measuring.replicas import scalable  # noqa: PLC0415 - imports torch

    try:
        what = scalable(composition.cfg)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    if target > what.most_replicas:
        unit, way = ("samples", "") if what.cut_is_free else ("shards", " a smaller batch.micro_size,")
        rule = (
            f"a step has {what.most_replicas} {unit}, and each replica needs one. "
            f"Give a larger batch.global_size,{way} or fewer replicas."
        )
        raise ConfigError([Problem(key="--to-replicas", value=target, rule=rule, origin=COMMAND_LINE)])
    return what


def _problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags, and the arguments that have no meaning."""
    if "to-replicas" not in call.flags:
        yield call.problem("to-replicas", "is needed: the largest number of replicas.")
    for word in call.arguments:
        yield Problem(key=word, rule="is not an argument of scale. Set a key by key=value.", origin=COMMAND_LINE)
    if "simulate" not in call.flags:
        return
    for name in _MEASURING:
        if name in call.flags:
            yield call.problem(name, "has no meaning with --simulate, which measures nothing.")
    for word in call.overrides:
        rule = "has no meaning with --simulate, which trains nothing: --assume NAME=VALUE,... sets its inputs."
        yield Problem(key=word, rule=rule, origin=COMMAND_LINE)
