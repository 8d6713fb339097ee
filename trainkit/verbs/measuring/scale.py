"""`trainkit scale OVERRIDES --to-replicas 64`: predict the speedup of more replicas, and from which number on it is too
small.

It measures a few replicas, fits a model, and predicts the others; with `--simulate` it measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.measuring.replicas import ScalableTraining, fitted, measured_shares, scalable
from trainkit.measuring.replicas import measure as measure_replicas
from trainkit.run.estimates.hardware import Hardware, hardware_of
from trainkit.scaling.answers import scale_document, scale_lines, simulated_document
from trainkit.scaling.inputs import HOSTS, SIMULATED, Origin, assumed, link_of, parse_assumptions
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.measured import Results, begin, line_printer, measure

_MEASURING: Final = ("rounds", "steps", "out")
_print_line: Final = line_printer("scale")


def run(call: Call) -> int:
    """Print the predictions for more replicas; return 1 if a measurement failed."""
    if "simulate" not in call.flags:
        composition = begin(call, "measure", problems(call))
        training = _planned_training(composition, call.flags["to-replicas"])
        return measure(call, "scale", partial(_measured, call, composition, training))
    refuse(problems(call))
    target, seed = call.flags["to-replicas"], call.flags.get("seed", 0)

    document = simulated_document(assumed(SIMULATED, {"given": _assumed(call)}), target, seed=seed)
    lines = scale_lines(document, f"prediction for {target:,} replicas, without a measurement")
    return measure(call, "scale", lambda: Results(content=document, lines=lines), keeps=False)


def _measured(call: Call, composition: Composition, training: ScalableTraining) -> Results | None:
    """Measure a few replicas, and fit the model to them; None if a measurement failed."""
    target, hardware = call.flags["to-replicas"], hardware_of(composition.cfg, _print_line)
    by_origin: dict[Origin, Mapping[str, float]] = {}
    if not training.on_cpu:
        by_origin["measured"] = {"per_host": float(training.plan.context.num_gpus)}
    if hardware is not None:
        link, price = hardware.between_hosts, hardware.price_usd_h
        links = {"gbit": link.gb_s * 8, "latency_us": link.latency_us}
        by_origin["hardware"] = links if price is None else {**links, "price_h": price}
    inputs = assumed(HOSTS, {**by_origin, "given": _assumed(call)})
    values = {name: item.value for name, item in inputs.items()}
    batch, strategy = training.plan.batch.global_size, composition.choices.get("strategy")
    rounds, steps = call.flags.get("rounds", 2), call.flags.get("steps")
    measured = measure_replicas(training, target, rounds=rounds, steps=steps, log=_print_line)
    if measured.failures:
        sys.stderr.write("".join(f"scale: failed: {line}\n" for line in measured.failures))
        return None
    fit = fitted(training, measured, None if hardware is None else hardware.within_host)
    document = scale_document(
        fit.on_hosts(int(values["per_host"]) or None, link_of(values)),
        target,
        inputs,
        training.at(2).remedies,
        seed=call.flags.get("seed", 0),
        measured=measured_shares(measured),
        has_tables=training.has_tables,
        on_cpu=training.on_cpu,
        notes=[*composition.notes, *_notes(training, values, hardware, is_checked=bool(fit.checks))],
    )
    title = f"scale of {training.plan.cfg.name}: strategy={strategy}, batch.global_size={batch}"
    lines = scale_lines(document, title, num_servers=training.at(2).remedies.num_servers)
    return Results(content=document, lines=lines, picture="scale", title=title, drawn=("predictions", "checks", "knee"))


def _notes(
    training: ScalableTraining, values: Mapping[str, float], hardware: Hardware | None, *, is_checked: bool
) -> Iterator[str]:
    if hardware is not None:
        yield f"links and price are those of {hardware.name}; compute times were measured on this machine."
    if training.on_cpu and not values["per_host"]:
        yield f"all replicas share the {training.cores} cores of this host; --assume per_host=1 assumes a host each."
    if not is_checked:
        yield "this machine measures only one replica: the exchange is assumed, and the model is not checked."
    if not values["price_h"]:
        yield "costs are left out: give hardware=NAME, or --assume price_h=2.5."


def _planned_training(composition: Composition, target: int) -> ScalableTraining:
    """Plan the training.

    Raises:
        ConfigError: its problems, a strategy without other numbers of replicas, or more replicas than samples.
    """
    try:
        training = scalable(composition.cfg)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    if target > training.most_replicas:
        unit, way = ("samples", "") if training.cut_is_free else ("shards", " a smaller batch.micro_size,")
        rule = (
            f"a step has {training.most_replicas} {unit}, and each replica needs one. "
            f"Give a larger batch.global_size,{way} or fewer replicas."
        )
        raise ConfigError([Problem(key="--to-replicas", value=target, rule=rule, origin=COMMAND_LINE)])
    return training


def _assumed(call: Call) -> dict[str, float]:
    return parse_assumptions(call.flags.get("assume"), SIMULATED if "simulate" in call.flags else HOSTS)


def problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags, and the arguments that have no meaning."""
    if "to-replicas" not in call.flags:
        yield call.problem("to-replicas", "is needed: the largest number of replicas.")
    yield from call.arity_problems((0, 0))
    if "simulate" in call.flags:
        for name in _MEASURING:
            if name in call.flags:
                yield call.problem(name, "has no meaning with --simulate, which measures nothing.")
        for word in call.overrides:
            rule = "has no meaning with --simulate, which trains nothing: --assume NAME=VALUE,... sets its inputs."
            yield Problem(key=word, rule=rule, origin=COMMAND_LINE)
    try:
        _assumed(call)
    except ConfigError as error:
        yield from error.problems
