"""`trainkit scale OVERRIDES --to-replicas 64`: predict the speedup of more replicas, and from which number on it is too
small.

It measures a few replicas, fits a model, and predicts the others; with `--simulate` it measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import ConfigError, Problem
from trainkit.report.json_output import print_json
from trainkit.verbs.support.call import JSON_FLAG, Call, Flag
from trainkit.verbs.support.measured import (
    composed,
    launch_problems,
    line_printer,
    out_problems,
    result_folder,
)

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.measuring.replicas import Measured, Scalable
    from trainkit.run.estimates.hardware import Hardware
    from trainkit.scaling.inputs import KnownInputs, LinkInputs
    from trainkit.scaling.model import Link
    from trainkit.scaling.result import Scaling

USAGE: Final = "OVERRIDES --to-replicas N, or --simulate --to-replicas N"
FLAGS: Final[Mapping[str, Flag]] = {
    "to-replicas": Flag(help="the largest number of replicas", value="N", least=1, most=10_000),
    "simulate": Flag(help="measure nothing: spares, staleness and checkpoints by simulation"),
    "assume": Flag(help="inputs that are not measured, such as gbit=100,price_h=2.5", value="NAME=VALUE,..."),
    "seed": Flag(help="seed of the simulation and of the intervals; 0 without it", value="N", least=0, most=2**32 - 1),
    "rounds": Flag(help="turns of each measurement; 2 without it", value="N", least=1, most=1_000),
    "steps": Flag(help="measured steps of a turn; without it, those of two seconds", value="N", least=1, most=100_000),
    "json": JSON_FLAG,
    "out": Flag(help="folder of scale.json and scale.png; without it, a new one below outputs/scale", value="FOLDER"),
}
_MEASURING: Final = ("rounds", "steps", "out")
_print_line: Final = line_printer("scale")


def run(call: Call) -> int:
    """Print the predictions for more replicas; return 1 if a measurement failed."""
    if "simulate" in call.flags:
        return _simulate(call)
    return _predict(call)


def _simulate(call: Call) -> int:
    from trainkit.scaling.inputs import Inputs, KnownInputs  # noqa: PLC0415 - imports numpy: not for --help

    problems = [*_flag_problems(call), *_without_meaning(call)]
    assumed = _assumed(call, Inputs, problems)
    if problems:
        raise ConfigError(problems)
    from trainkit.scaling.study import study  # noqa: PLC0415 - as above
    from trainkit.scaling.study_text import study_json, study_lines  # noqa: PLC0415 - the same

    target, seed = int(call.flags["to-replicas"]), call.number("seed") or 0
    known = KnownInputs(values=Inputs()).with_values("given", assumed)
    found = study(known.values, target, seed=seed)
    if "json" in call.flags:
        print_json(study_json(found, known, target, seed))
    else:
        sys.stdout.write("\n".join([*study_lines(found, known, target), ""]))
    return 0


def _predict(call: Call) -> int:
    from trainkit.scaling.inputs import LinkInputs  # noqa: PLC0415 - imports numpy: not for --help

    problems = [*_flag_problems(call), *_argument_problems(call), *launch_problems("scale", "measure")]
    assumed = _assumed(call, LinkInputs, problems)
    composition = composed(call, problems)
    if problems or composition is None:
        raise ConfigError(problems)
    target = int(call.flags["to-replicas"])
    what = _scalable(composition, target)
    from trainkit.measuring.replicas import measure  # noqa: PLC0415 - imports torch

    with result_folder("scale", call.flags.get("out")) as folder:
        measured = measure(what, target, rounds=call.number("rounds") or 2, steps=call.number("steps"), log=_print_line)
        if measured.failures:
            sys.stderr.write("".join(f"scale: failed: {line}\n" for line in measured.failures))
            return 1
        found = _answers(call, what, measured, assumed, composition)
        _show(call, folder, found, target)
    return 0


def _answers(
    call: Call,
    what: Scalable,
    measured: Measured,
    assumed: Mapping[str, float],
    composition: Composition,
) -> Scaling:
    """Fit the model to the measurements, and return its answers."""
    from trainkit.measuring.replicas import (  # noqa: PLC0415 - imports torch
        computing_error,
        known_counts,
        measured_shares,
        remediable,
        workload,
    )
    from trainkit.run.estimates.hardware import hardware_of  # noqa: PLC0415 - the same
    from trainkit.scaling.fit import fit  # noqa: PLC0415 - imports numpy
    from trainkit.scaling.result import ScalingSubject, scaling_of  # noqa: PLC0415 - the same

    target, hardware = int(call.flags["to-replicas"]), hardware_of(composition.cfg)
    known = _known(what, hardware, assumed)
    per_host = int(known.values.per_host) or None
    work = workload(what, measured, within=_within(what, hardware))
    points = measured.points(grows=work.grows)
    strategy = composition.choices.get("strategy")
    subject = ScalingSubject(
        title=f"scale of {what.plan.cfg.name}: strategy={strategy}, batch.global_size={what.plan.batch.global_size}",
        known=known,
        shares=measured_shares(measured),
        keys=remediable(what),
        on_cpu=what.on_cpu,
        notes=[*composition.notes, *_notes(what, known.values, hardware, points=len(points))],
    )
    fitted = fit(work, points, computing=computing_error(measured)).on_hosts(per_host, _between(known.values))
    counts = known_counts(target, [point.replicas for point in points])
    return scaling_of(fitted, counts, subject, seed=call.number("seed") or 0)


def _notes(what: Scalable, values: LinkInputs, hardware: Hardware | None, *, points: int) -> Iterator[str]:
    if hardware is not None:
        yield f"links and price are those of {hardware.name}; compute times were measured on this machine."
    if what.on_cpu and not values.per_host:
        yield f"all replicas share the {what.cores} cores of this host; --assume per_host=1 assumes a host each."
    if not points:
        yield "this machine measures only one replica: the exchange is assumed, and the model is not checked."
    if not values.price_h:
        yield "costs are left out: give hardware=NAME, or --assume price_h=2.5."


def _known(what: Scalable, hardware: Hardware | None, assumed: Mapping[str, float]) -> KnownInputs[LinkInputs]:
    """Return links and price: the given ones, else those of the hardware, else assumptions."""
    from trainkit.scaling.inputs import KnownInputs, LinkInputs  # noqa: PLC0415 - imports numpy

    known = KnownInputs(values=LinkInputs())
    if not what.on_cpu:
        known = known.with_values("measured", {"per_host": float(what.plan.facts.num_gpus)})
    if hardware is not None:
        link = hardware.between_hosts
        found = {"gbit": link.gb_s * 8, "latency_us": link.latency_us}
        price = {} if hardware.price_usd_h is None else {"price_h": hardware.price_usd_h}
        known = known.with_values("hardware", {**found, **price})
    return known.with_values("given", assumed)


def _within(what: Scalable, hardware: Hardware | None) -> Link:
    from trainkit.scaling.model import Link  # noqa: PLC0415 - imports numpy

    if hardware is not None:
        link = hardware.within_host
        return Link(bandwidth=link.gb_s * 1e9, latency_s=link.latency_us / 1e6)
    # The starting values, before any measurement: gloo over loopback, or PCIe 3 x 16. The fit changes both within a
    # factor of 13.
    return Link(bandwidth=2e9, latency_s=1e-4) if what.on_cpu else Link(bandwidth=1e10, latency_s=1e-5)


def _between(values: LinkInputs) -> Link:
    from trainkit.scaling.model import Link  # noqa: PLC0415 - imports numpy

    return Link(bandwidth=values.bandwidth, latency_s=values.latency_s)


def _show(call: Call, folder: Path, found: Scaling, target: int) -> None:
    """Write scale.json and scale.png, and print the answers."""
    from trainkit.files import write_json_atomically  # noqa: PLC0415 - imports torch
    from trainkit.scaling.drawing import draw_scaling  # noqa: PLC0415 - imports matplotlib
    from trainkit.scaling.result import scaling_json, scaling_lines  # noqa: PLC0415 - imports numpy
    from trainkit.storage import reporting  # noqa: PLC0415 - the same

    content = scaling_json(found, target=target, seed=call.number("seed") or 0)
    with reporting(folder):
        write_json_atomically(folder / "scale.json", content)
        draw_scaling(folder / "scale.png", found)
    if "json" in call.flags:
        print_json(content)
    else:
        sys.stdout.write("\n".join([*scaling_lines(found), f"  folder  {folder}"]) + "\n")


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


def _flag_problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags."""
    yield from call.number_problems(FLAGS)
    if "to-replicas" not in call.flags:
        yield call.problem("to-replicas", f"is needed: {FLAGS['to-replicas'].help}.")
    yield from out_problems(call)


def _argument_problems(call: Call) -> Iterator[Problem]:
    for word in call.arguments:
        yield Problem(key=word, rule="is not an argument of scale. Set a key by key=value.", origin=COMMAND_LINE)


def _without_meaning(call: Call) -> Iterator[Problem]:
    """Yield a problem for each argument that has no meaning with --simulate."""
    yield from _argument_problems(call)
    for name in _MEASURING:
        if name in call.flags:
            yield call.problem(name, "has no meaning with --simulate, which measures nothing.")
    for word in call.overrides:
        rule = "has no meaning with --simulate, which trains nothing: --assume NAME=VALUE,... sets its inputs."
        yield Problem(key=word, rule=rule, origin=COMMAND_LINE)


def _assumed(call: Call, kind: type, problems: list[Problem]) -> dict[str, float]:
    """Return the values of --assume, and add their problems."""
    from trainkit.scaling.inputs import parse_assumptions  # noqa: PLC0415 - imports numpy

    text = call.flags.get("assume")
    try:
        return {} if text is None else parse_assumptions(text, kind)
    except ConfigError as error:
        problems += error.problems
        return {}
