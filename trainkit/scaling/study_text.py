"""The results of a simulation as lines of text, and as a JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from trainkit.report.numbers import duration, figure, share
from trainkit.scaling.inputs import Inputs, KnownInputs, Values
from trainkit.scaling.study import Study

VERSION: Final = 1
"""Version of the JSON of `scale`."""


def study_lines(study: Study, known: KnownInputs[Inputs], target: int) -> Iterator[str]:
    """Yield the inputs, a table for each question, and the answers."""
    yield f"simulation of {target:,} replicas"
    yield from input_lines(known)
    yield ""
    yield "synchronous steps, all-reduce over a ring"
    yield from _replicas_lines(study)
    yield from _spares_lines(study)
    yield from _server_lines(study)
    yield from _checkpoint_lines(study)


def _replicas_lines(study: Study) -> Iterator[str]:
    has_price = study.replicas[0].cost_per_million is not None
    headings = ["replicas", "ms a step", "waiting for the slowest", "exchange", "samples/s", "speed-up", "efficiency"]
    rows = [
        (
            f"{row.replicas:,}",
            *map(_ms, (row.step_s, row.waiting_s, row.exchange_s)),
            figure(row.samples_per_s),
            figure(row.speedup),
            share(row.efficiency),
            *([figure(row.cost_per_million)] if row.cost_per_million is not None else []),
        )
        for row in study.replicas
    ]
    yield from table([*headings, *(["cost of a million samples"] if has_price else [])], rows)


def input_lines(known: KnownInputs[Values]) -> Iterator[str]:
    """Yield a line for each input: value, origin and meaning."""
    rows = [
        (name, f"{figure(value)} {unit}".rstrip(), origin, means) for name, value, unit, origin, means in known.rows()
    ]
    yield from table(("input", "value", "", "meaning"), rows, left=4)


def _spares_lines(study: Study) -> Iterator[str]:
    if len(study.spares) < 2:
        return
    yield ""
    yield "spares: a step takes the first gradients, strategy.spare_mode=replace; links are ignored"
    rows = [(f"{row.spares:,}", _ms(row.step_s), f"{row.gain:.3f}", share(row.wasted)) for row in study.spares]
    yield from table(("spares", "ms a step", "samples/s, vs no spares", "discarded"), rows)
    best = study.best_spares
    if best.spares:
        yield f"  most samples a second: {best.spares:,} spares, {best.gain:.2f} times those without"
    else:
        yield "  spares gain nothing: the slowest replica costs less than a spare"


def _server_lines(study: Study) -> Iterator[str]:
    yield ""
    yield "asynchronous updates through parameter servers"
    headings = (
        "servers",
        "slow workers",
        "staleness.policy",
        "updates a second",
        "of the ideal",
        "link used",
        "staleness: mean",
        "p95",
        "for nothing",
    )
    rows = [
        (
            f"{row.servers:,}",
            f"{row.slow_workers:,}",
            row.policy,
            figure(row.updates_per_s),
            share(row.of_ideal),
            share(row.link_load),
            f"{row.staleness:.1f}",
            f"{row.staleness_p95:.0f}",
            share(row.wasted),
        )
        for row in (*study.servers, *study.policies)
    ]
    yield from table(headings, rows)
    if study.servers_needed is None:
        yield f"  the servers' links are the bottleneck, even with {study.servers[-1].servers:,} servers"
    elif study.servers_needed == 1:
        yield "  the link of one server is no bottleneck"
    else:
        yield f"  the servers' links are the bottleneck below {study.servers_needed:,} servers"


def _checkpoint_lines(study: Study) -> Iterator[str]:
    yield ""
    yield f"checkpoints: a failure of the whole run every {duration(study.mtbf_s)}"
    rows = [
        (
            duration(row.interval_s),
            f"{row.simulated:.4f}",
            f"{row.formula:.4f}",
            "Daly's optimum" if row.is_best else "",
        )
        for row in study.checkpoints
    ]
    yield from table(("interval", "time of progress", "Daly's formula", ""), rows)
    best_s = study.best_checkpoint.interval_s
    yield f"  write one every {duration(best_s)}: checkpoint.every_s={best_s:.0f}"


def study_json(study: Study, known: KnownInputs[Inputs], target: int, seed: int) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "version": VERSION,
        "to_replicas": target,
        "seed": seed,
        "inputs": inputs_json(known),
        "simulation": asdict(study)
        | {"best_spares": study.best_spares.spares, "best_checkpoint_s": study.best_checkpoint.interval_s},
    }


def inputs_json(known: KnownInputs[Values]) -> dict[str, dict[str, object]]:
    """Return value, unit and origin of each input."""
    return {
        name: {"value": value, "unit": unit or None, "origin": origin} for name, value, unit, origin, _ in known.rows()
    }


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> Iterator[str]:
    """Yield an indented table; the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    for row in (headings, *rows):
        cells = [
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _ms(seconds: float) -> str:
    return figure(seconds * 1000)
