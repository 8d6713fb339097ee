"""The document of `trainkit bench`, and its tables."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal, cast

import torch
from typing_extensions import TypedDict

from trainkit.cluster.host import num_cores
from trainkit.files import num_bytes
from trainkit.measuring.bench import SPREADS, STEP_PARTS, Choice, Spread, Target
from trainkit.report.numbers import duration, figure, share
from trainkit.report.tables import row_lines
from trainkit.run.begin import packages


class PartsOfRank(TypedDict):
    """Seconds of the parts of all measured steps of a turn, on one rank."""

    input: float
    """Waiting for the batch."""
    forward: float
    """The forward passes."""
    backward: float
    """The backward passes."""
    exchange: float
    """Summing the gradients after backward, and waiting for other ranks."""
    update: float
    """Updating the parameters."""


class PartsOfStep(TypedDict):
    """Seconds of the parts of a step, the mean over the ranks."""

    input: Spread | None
    """Waiting for the batch."""
    forward: Spread | None
    """The forward passes."""
    backward: Spread | None
    """The backward passes."""
    exchange: Spread | None
    """Summing the gradients after backward, and waiting for other ranks."""
    update: Spread | None
    """Updating the parameters."""
    rest: Spread | None
    """Time that belongs to no part: the loop, the log, agreement between ranks."""


class Reached(TypedDict):
    """The moment at which a training reached the result of `--until`."""

    seconds: float
    """Seconds of training until then, without evaluations."""
    steps: int
    """Updates until then."""
    samples: int
    """Samples used until then."""
    value: float
    """Value of the metric."""


class MeasuredTurn(TypedDict):
    """The measurement of one turn."""

    steps: int
    """Measured steps."""
    samples: int
    """Samples of these steps, over all replicas."""
    seconds: float
    """Seconds of these steps."""
    targets: float
    """Targets of these steps (tokens of a language model), or their weight."""
    joules: float | None
    """Energy of the devices in these steps, in joules; null if no device reports it."""
    ranks: list[PartsOfRank]
    """The parts of these steps on each rank."""
    peak_bytes: int
    """The most memory of a process, in bytes."""
    began_at: float
    """When the first step began, in seconds since the epoch."""
    first_step_s: float
    """Seconds of the first step."""
    step_spread: float
    """Standard deviation of single steps divided by their median, on rank 0; 0 if there were too few steps."""
    compile_s: float
    """Seconds in which torch.compile worked."""
    replicas: int
    """Replicas with shards of their own."""
    device: str
    """cpu or cuda."""
    until: Reached | None
    """The moment at which the result of `--until` was reached; null if it was not, or without `--until`."""
    metric: float | None
    """The last value of the metric of `--until`."""
    trained_s: float
    """Seconds of training of the whole turn."""
    trained_steps: int
    """Updates of the whole turn."""


class MeasuredChoice(TypedDict):
    """One choice."""

    label: str
    """The arguments that distinguish the choice from the others; with --data, its number of workers."""
    status: Literal["measured", "failed"]
    """Whether a turn failed."""
    failure: str | None
    """Reason of the failure; null if no turn failed."""
    replicas: int | None
    """Replicas with shards of their own."""
    device: str | None
    """cpu or cuda."""
    steps: int | None
    """Measured steps of a turn."""
    samples_per_s: Spread | None
    """Samples per second over all replicas."""
    targets_per_s: Spread | None
    """Targets per second; null if each sample is one target."""
    step_s: Spread | None
    """Seconds of a step."""
    parts_s: PartsOfStep
    """Seconds of the parts of a step."""
    peak_bytes: int | None
    """The most memory of a process, in bytes."""
    start_s: Spread | None
    """Seconds from the start of the process to the first step."""
    first_step_s: Spread | None
    """Seconds of the first step."""
    compile_s: Spread | None
    """Seconds in which torch.compile worked."""
    cold_start_s: float | None
    """Seconds to the first step in the turn before the first round; null if there was none."""
    joules_per_sample: Spread | None
    """Energy of the devices per sample, in joules; null if no device reports it."""
    until_s: Spread | None
    """Seconds of training to the result of --until; null if a turn has not reached it, or without --until."""
    turns: list[MeasuredTurn]
    """The turns that count."""


class Machine(TypedDict):
    """The machine of the measurement."""

    system: str
    """The operating system."""
    processor: str
    """Name of the processor."""
    cores: int
    """Cores that trainkit may use."""
    gpus: list[str]
    """The names of its GPUs."""
    packages: dict[str, str]
    """Versions of packages, by name."""


class DataVerdict(TypedDict):
    """The verdict of --data."""

    bound_by: Literal["loader", "model"]
    """The bottleneck of the training."""
    num_workers: int
    """The loader.num_workers to use."""
    reason: str
    """The number of workers and the reason for it, in words."""


@dataclass(frozen=True, kw_only=True)
class BenchDocument:
    """The result of `trainkit bench`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the measurement ended, with the time zone."""
    machine: Machine
    """The machine of the measurement."""
    rounds: int
    """Turns of each choice."""
    until: Target | None
    """The requested result; null without --until."""
    choices: list[MeasuredChoice]
    """The choices, in the order of the command."""
    notes: list[str]
    """Notes for the user."""
    data: DataVerdict | None
    """The verdict of --data; null without."""


def bench_document(
    choices: Sequence[Choice],
    *,
    command: str,
    rounds: int,
    notes: Sequence[str],
    target: Target | None = None,
    data: DataVerdict | None = None,
) -> BenchDocument:
    """Return what was measured, where, when and by which command."""
    entries, notes = [_measured(choice) for choice in choices], list(dict.fromkeys(notes))
    return BenchDocument(
        **header(command), machine=machine(), rounds=rounds, until=target, choices=entries, notes=notes, data=data
    )


def _measured(choice: Choice) -> MeasuredChoice:
    figures = next((turn.figures for turn in choice.turns), {})
    entry = {
        "label": choice.label,
        "status": "failed" if choice.failure else "measured",
        "failure": choice.failure or None,
        **{name: figures.get(name) for name in ("replicas", "device", "steps")},
        **{name: choice.spread(name) for name in SPREADS if name in MeasuredChoice.__annotations__},
        "parts_s": {part: choice.spread(part) for part in STEP_PARTS},
        "peak_bytes": choice.peak_bytes or None,
        "cold_start_s": None if choice.cold is None else choice.cold.start_s,
        "turns": [dict(turn.figures) for turn in choice.turns],
    }
    return cast("MeasuredChoice", entry)


class Header(TypedDict):
    """The beginning of the document of a measurement."""

    version: int
    command: str
    date: str


def header(command: str) -> Header:
    """Return the beginning of a document."""
    return {"version": 1, "command": command, "date": datetime.now().astimezone().isoformat(timespec="seconds")}


def machine() -> Machine:
    """Return the machine, and the versions that measured."""
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": num_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "packages": packages({}),
    }


def table_lines(choices: Sequence[Choice], *, target: Target | None = None) -> Iterator[str]:
    """Yield the lines of the tables: speed and cost of each choice, and the parts of its step."""
    width = max(len(choice.label) for choice in choices)
    measured = [choice for choice in choices if choice.is_measured]
    tables: list[Mapping[str, Column]] = [] if target is None else [_until_columns(target)]
    tables += [speed_columns(measured), PART_COLUMNS] if measured else []
    for index, columns in enumerate(tables):
        yield from ["", *table(width, measured, columns)][index == 0 :]
    yield from (f"  {choice.label}: failed: {choice.failure}" for choice in choices if choice.failure)


Column = Callable[[Choice], str]


def table(width: int, choices: Sequence[Choice], columns: Mapping[str, Column], *, title: str = "choice") -> list[str]:
    """Return the lines of a table with a row for each choice, whose label is as wide as this."""
    rows = [[choice.label.ljust(width), *(cell(choice) for cell in columns.values())] for choice in choices]
    return row_lines([title.ljust(width), *columns], rows)


def speed_columns(measured: Sequence[Choice]) -> dict[str, Column]:
    """Return the columns about the speed and the cost of these choices."""
    first = _median(measured[0], "samples_per_s")
    columns: dict[str, Column] = {
        "samples/s": partial(_cell, "samples_per_s", figure),
        "from .. to": lambda choice: range_text(choice.samples_per_s),
        "ratio": lambda choice: f"{_median(choice, 'samples_per_s') / first:.2f}",
        "targets/s": partial(_cell, "targets_per_s", figure),
        "memory": lambda choice: num_bytes(choice.peak_bytes),
        "start": partial(_cell, "start_s", duration),
        "first step": partial(_cell, "first_step_s", duration),
        "of it compiling": partial(_cell, "compile_s", duration),
        "J/sample": partial(_cell, "joules_per_sample", figure),
    }
    for name, column in (("targets_per_s", "targets/s"), ("joules_per_sample", "J/sample")):
        if not any(choice.spread(name) for choice in measured):
            del columns[column]
    if not any(_median(choice, "compile_s") > 0 for choice in measured):
        del columns["of it compiling"]
    return columns


def _share_of_step(part: str, choice: Choice) -> str:
    return share(_median(choice, part) / _median(choice, "step_s"))


PART_COLUMNS: Final[Mapping[str, Column]] = {
    "ms a step": lambda choice: figure(1e3 * _median(choice, "step_s")),
    **{part: partial(_share_of_step, part) for part in STEP_PARTS},
}
"""The columns about the parts of a step."""


def _until_columns(target: Target) -> dict[str, Column]:
    def reached(choice: Choice) -> str:
        if (until := choice.spread("until_s")) is not None:
            return duration(until.median)
        values = [turn.figures.get("metric") for turn in choice.turns]
        ends = ", ".join(figure(value) for value in values if value is not None)
        return f"not reached: {ends}" if ends else "not reached"

    return {
        f"{target.metric} of {target.value:g}": reached,
        "steps": lambda choice: f"{max((turn.figures['trained_steps'] for turn in choice.turns), default=0):,}",
    }


def _median(choice: Choice, name: str) -> float:
    spread = choice.spread(name)
    return math.nan if spread is None else spread.median


def _cell(name: str, show: Callable[[float], str], choice: Choice) -> str:
    return "" if choice.spread(name) is None else show(_median(choice, name))


def range_text(spread: Spread | None) -> str:
    """Return the least and the greatest of some turns."""
    return "" if spread is None else f"{figure(spread.low)} .. {figure(spread.high)}"
