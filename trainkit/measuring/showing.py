"""Show measurements: tables for the terminal, and the JSON of `trainkit bench --json` and `trainkit find --json`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, Final

import torch

from trainkit.cluster.host import num_cores
from trainkit.files import num_bytes
from trainkit.measuring.bench import Choice, Spread, Target
from trainkit.measuring.range_test import LrCurve, RangeResult, rounded
from trainkit.measuring.searches import TIE, MicroSizeSearch, Size, WorkerSearch
from trainkit.report.numbers import duration, figure, share
from trainkit.report.tables import row_lines
from trainkit.run.begin import packages
from trainkit.trainer.metrics_accumulator import PARTS

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
        **_header(command),
        "machine": machine(),
        "rounds": rounds,
        "until": None if target is None else asdict(target),
        "choices": [_choice(one) for one in choices],
        "notes": list(notes),
        "data": None,
    }


def _header(command: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "command": command,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
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


_SPREADS: Final = (
    "samples_per_s", "targets_per_s", "step_s", "start_s", "first_step_s", "compile_s", "joules_per_sample", "until_s",
)  # fmt: skip
"""Figures of a choice that are spreads over its turns."""


def _choice(one: Choice) -> dict[str, Any]:
    figures = next((turn.figures for turn in one.turns if turn.figures), {})
    return {
        "label": one.label,
        "status": "failed" if one.failure else "measured",
        "failure": one.failure or None,
        **{name: figures.get(name) for name in ("replicas", "device", "steps")},
        **{name: plain(getattr(one, name)) for name in _SPREADS},
        "parts_s": {part: plain(one.part_s(part)) for part in (*PARTS, "rest")},
        "peak_bytes": one.peak_bytes or None,
        "cold_start_s": None if one.cold is None else one.cold.start_s,
        "turns": [dict(turn.figures) for turn in one.turns],
    }


def plain(spread: Spread | None) -> dict[str, float] | None:
    """Return a spread as a JSON value."""
    return None if spread is None else asdict(spread)


_ROWS: Final = 12
"""Steps of the curve that the terminal shows."""
_ENDS: Final = {
    "diverged": "the loss diverges at {lr}",
    "not_finite": "the loss is no longer finite after {lr}",
    "range": "the loss has not diverged up to {lr}: try a larger --max-lr",
}
NO_FALL: Final = "the loss does not fall in this range by more than its noise: no rate is suggested"


def rate_document(
    found: RangeResult,
    *,
    command: str,
    asked: tuple[float, float, int],
    global_size: int,
    scale: float,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the content of `find_lr.json`.

    Args:
        found: the result of the test.
        command: the command, without secrets.
        asked: the first rate, the last rate, and the number of steps.
        global_size: samples per step.
        scale: the peak rate of the config divided by `optimizer.lr`: the factor of `lr_scaling`.
        notes: notes for the user.
    """
    curve = found.curve
    return {
        **_header(command),
        "global_size": global_size,
        "min_lr": asked[0],
        "max_lr": asked[1],
        "steps": asked[2],
        "ended": found.ended,
        "steepest": _suggested(curve.steepest, scale),
        "tenth_of_minimum": _suggested(curve.tenth_of_minimum, scale),
        "points": [
            {"lr": point.lr, "loss": point.loss, "smoothed": smoothed}
            for point, smoothed in zip(curve.points, curve.smoothed, strict=True)
        ],
        "notes": list(notes),
    }


def _suggested(rate: float | None, scale: float) -> dict[str, Any] | None:
    return None if rate is None else {"lr": rate, "override": f"optimizer.lr={rounded(rate / scale):g}"}


def rate_lines(found: RangeResult, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of `trainkit find lr`: some steps of the curve, the reason for its end, and the overrides."""
    curve = found.curve
    rows = [
        [figure(curve.points[at].lr), figure(curve.points[at].loss), figure(curve.smoothed[at])] for at in _shown(curve)
    ]
    yield from row_lines(["learning rate", "loss", "smoothed"], rows)
    yield ""
    end = _ENDS[found.ended].format(lr=figure(curve.points[-1].lr))
    yield f"  {end} (step {len(curve.points)} of {content['steps']}, {content['global_size']:,} samples a step)."
    suggested = {"steepest fall": content["steepest"], "a tenth of the minimum's rate": content["tenth_of_minimum"]}
    if curve.steepest is None:
        yield f"  {NO_FALL}."
    width = max(map(len, suggested))
    for name, rate in suggested.items():
        if rate is not None:
            given = f"optimizer.lr={rate['lr']:g}"
            scaled = "" if rate["override"] == given else f"  ({rate['lr']:g} after lr_scaling)"
            yield f"  {name:<{width}}  {rate['override']}{scaled}"


def _shown(curve: LrCurve) -> list[int]:
    """Return the indices of some points of the curve, evenly spaced, with the first and the last one."""
    last, count = len(curve.points) - 1, min(len(curve.points), _ROWS)
    return [last * place // max(count - 1, 1) for place in range(count)]


def size_document(
    found: MicroSizeSearch, *, command: str, rounds: int, overrides: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the content of `find_micro_size.json`."""
    return {
        **_header(command),
        "machine": machine(),
        "global_size": found.global_size,
        "replicas": found.num_replicas,
        "rounds": rounds,
        "sizes": [_size(one) for one in found.sizes],
        "micro_size": None if found.best is None else found.best.micro_size,
        "overrides": list(overrides),
        "notes": list(notes),
    }


def _size(one: Size) -> dict[str, Any]:
    return {
        "micro_size": one.micro_size,
        "accumulation": one.accumulation,
        "status": one.status,
        "reason": one.reason or None,
        "samples_per_s": plain(one.choice.samples_per_s),
        "step_s": plain(one.choice.step_s),
        "peak_bytes": one.choice.peak_bytes or None,
        "predicted_bytes": one.needs,
    }


def size_lines(found: MicroSizeSearch, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the lines of `trainkit find micro_size`: the sizes that were measured, the others, and the overrides."""
    measured = [one for one in found.sizes if one.status == "measured"]
    if measured:
        fastest = max(one.speed for one in measured)
        columns: dict[str, Callable[[Size], str]] = {
            "micro size": lambda one: str(one.micro_size),
            "shards a replica": lambda one: str(one.accumulation),
            "samples/s": lambda one: figure(one.speed),
            "from .. to": lambda one: _range(one.choice.samples_per_s),
            "of the fastest": lambda one: share(one.speed / fastest),
            "memory": lambda one: num_bytes(one.choice.peak_bytes),
        }
        if any(one.needs is not None for one in measured):
            columns["planned for the host"] = lambda one: "" if one.needs is None else num_bytes(one.needs)
        yield from row_lines([*columns], [[cell(one) for cell in columns.values()] for one in measured])
        yield ""
    for reason, sizes in _unmeasured(found.sizes).items():
        yield f"  {', '.join(sizes)}: {reason}"
    if found.best is None:
        yield "  No size could be measured."
        return
    yield (
        f"  {found.best.micro_size}: the smallest size within {share(TIE)} of the fastest; "
        f"{found.global_size:,} samples a step, as before."
    )
    yield f"  {' '.join(overrides)}"


def _unmeasured(sizes: Sequence[Size]) -> dict[str, list[str]]:
    """Return the sizes that were not measured, by the reason."""
    found: dict[str, list[str]] = {}
    for one in sizes:
        if one.status != "measured":
            words = "out of memory: " if one.status == "out_of_memory" else ""
            found.setdefault(words + one.reason, []).append(str(one.micro_size))
    return found
