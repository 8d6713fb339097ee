"""Show measurements: tables for the terminal, and the JSON of `trainkit bench --json`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import torch

from trainkit.cluster.host import num_cores
from trainkit.measuring.figures import Choice, Spread
from trainkit.measuring.turns import Target
from trainkit.measuring.workers import WorkerSearch
from trainkit.report.numbers import duration, figure, share
from trainkit.report.tables import row_lines
from trainkit.run.begin import packages
from trainkit.storage import num_bytes
from trainkit.trainer.phase_clock import PARTS

VERSION: Final = 1
"""Version of the JSON."""


def table_lines(choices: Sequence[Choice], *, target: Target | None = None) -> Iterator[str]:
    """Yield the lines of the tables: speed and cost of each choice, and the parts of its step."""
    width = max(len(choice.label) for choice in choices)
    measured = [choice for choice in choices if choice.is_measured]
    if target is not None:
        yield from _with(width, measured, dict(_until_columns(target)))
        yield ""
    if measured:
        yield from _with(width, measured, dict(_speed_columns(measured)))
        yield ""
        yield from _with(width, measured, dict(_part_columns()))
    for choice in choices:
        if choice.failure:
            yield f"  {choice.label}: failed: {choice.failure}"


def data_lines(found: WorkerSearch) -> Iterator[str]:
    """Yield the lines of `trainkit bench --data`: the numbers of workers that were measured, and the verdict."""
    measured = [choice for choice in found.choices if choice.is_measured]
    if measured:
        columns = dict(_speed_columns(measured))
        kept = {name: columns[name] for name in ("samples/s", "from .. to", "ratio", "memory")}
        steps = {name: cell for name, cell in _part_columns() if name in {"ms a step", "input"}}
        yield from _with(0, measured, {**kept, **steps}, title="workers")
        yield ""
    yield from (f"  {choice.label}: failed: {choice.failure}" for choice in found.choices if choice.failure)
    verdict = "bound by its loader" if found.is_loader_bound else "bound by its model"
    yield f"  {verdict if measured else 'not measured'}. loader.num_workers={found.reason}."


Column = Callable[[Choice], str]


def _with(width: int, choices: Sequence[Choice], columns: dict[str, Column], *, title: str = "choice") -> list[str]:
    rows = [[choice.label.ljust(width), *(cell(choice) for cell in columns.values())] for choice in choices]
    return row_lines([title.ljust(width), *columns], rows)


def _speed_columns(measured: Sequence[Choice]) -> Iterator[tuple[str, Column]]:
    first = measured[0].samples_per_s
    yield "samples/s", lambda one: _median(one.samples_per_s)
    yield "from .. to", lambda one: _range(one.samples_per_s)
    yield "ratio", lambda one: f"{_number(one.samples_per_s) / _number(first):.2f}"
    if any(one.targets_per_s for one in measured):
        yield "targets/s", lambda one: _median(one.targets_per_s)
    yield "memory", lambda one: num_bytes(one.peak_bytes)
    yield "start", lambda one: duration(_number(one.start_s))
    yield "first step", lambda one: duration(_number(one.first_step_s))
    if any(_number(one.compile_s) > 0 for one in measured):
        yield "of it compiling", lambda one: duration(_number(one.compile_s))
    if any(one.joules_per_sample for one in measured):
        yield "J/sample", lambda one: _median(one.joules_per_sample)


def _part_columns() -> Iterator[tuple[str, Column]]:
    yield "ms a step", lambda one: figure(1e3 * _number(one.step_s))
    for part in (*PARTS, "rest"):
        yield part, partial(_share_of, part)


def _share_of(part: str, one: Choice) -> str:
    return share(_number(one.part_s(part)) / _number(one.step_s))


def _until_columns(target: Target) -> Iterator[tuple[str, Column]]:
    def reached(one: Choice) -> str:
        if one.until_s is not None:
            return duration(one.until_s.median)
        values = [turn.figures.get("metric") for turn in one.turns]
        ends = ", ".join(figure(value) for value in values if value is not None)
        return f"not reached: {ends}" if ends else "not reached"

    yield f"{target.metric} of {target.value:g}", reached
    yield "steps", lambda one: f"{max((turn.figures['trained_steps'] for turn in one.turns), default=0):,}"


def _number(spread: Spread | None) -> float:
    return float("nan") if spread is None else spread.median


def _median(spread: Spread | None) -> str:
    return "" if spread is None else figure(spread.median)


def _range(spread: Spread | None) -> str:
    return "" if spread is None else f"{figure(spread.low)} .. {figure(spread.high)}"


def document(
    choices: Sequence[Choice],
    *,
    command: str,
    rounds: int,
    target: Target | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of `bench.json`: what was measured, where, when and by which command."""
    return {
        "version": VERSION,
        "command": command,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "rounds": rounds,
        "until": None if target is None else {"metric": target.metric, "value": target.value, "mode": target.mode},
        "choices": [_choice(one) for one in choices],
        "notes": list(notes),
        "data": None,
    }


def machine() -> dict[str, Any]:
    """Return the machine, and the versions that measured."""
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": num_cores(),
        "gpus": gpus,
        "packages": packages({}),
    }


def _choice(one: Choice) -> dict[str, Any]:
    figures = next((turn.figures for turn in one.turns if turn.figures), {})
    return {
        "label": one.label,
        "status": "failed" if one.failure else "measured",
        "failure": one.failure or None,
        "replicas": figures.get("replicas"),
        "device": figures.get("device"),
        "steps": figures.get("steps"),
        "samples_per_s": plain(one.samples_per_s),
        "targets_per_s": plain(one.targets_per_s),
        "step_s": plain(one.step_s),
        "parts_s": {part: plain(one.part_s(part)) for part in (*PARTS, "rest")},
        "peak_bytes": one.peak_bytes or None,
        "start_s": plain(one.start_s),
        "first_step_s": plain(one.first_step_s),
        "compile_s": plain(one.compile_s),
        "cold_start_s": None if one.cold is None else one.cold.start_s,
        "joules_per_sample": plain(one.joules_per_sample),
        "until_s": plain(one.until_s),
        "turns": [dict(turn.figures) for turn in one.turns],
    }


def plain(spread: Spread | None) -> dict[str, float] | None:
    """Return a spread as a JSON value."""
    return None if spread is None else spread.to_json()
