"""The parts of a first contact that are timed, and what they are held to."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks import report
from benchmarks.gpu.bench import ALONE, OVER, Bench, Row, failed, rows_of
from benchmarks.gpu.holding import memory_row
from benchmarks.gpu.turns import HAND
from benchmarks.gpu.workloads import WORKLOADS, Workload
from trainkit.run.estimates.hardware import recognised

TOKENS_A_SECOND: Final = 470_000
"""GPT-2 124M on one H100."""
UTILISATION: Final = 0.45
"""MFU of the GPT of 1.3 B parameters."""
_TO_START_S: Final = 15.0
"""Seconds of a process before its first turn."""
PLANNED: Final = 10.0
"""Per cent by which a peak of memory may differ from the planned one."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What one compile mode of trainkit is held to."""

    mode: str
    least_of_hand: float | None = None
    """Of the speed of the hand-written loop, at least."""
    most_of_eager: float | None = None
    """Of the time of an eager step of trainkit, at most."""


GOALS: Final[Mapping[str, Goal]] = {
    "gpt": Goal(mode="default", least_of_hand=0.97),
    "resnet": Goal(mode="default", least_of_hand=1.0),
    "resnet_shards": Goal(mode="default", least_of_hand=1.0),
    "mlp": Goal(mode="captured", most_of_eager=0.3),
}


def speed(bench: Bench, *, name: str) -> Iterator[Row]:
    """Measure steps in turns with a hand-written loop; a ratio is that of samples a second."""
    workload, goal = WORKLOADS[name](bench.small), GOALS[name]
    modes = (goal.mode, "off") if bench.small and goal.most_of_eager else bench.selected((goal.mode, "off"))
    seconds = bench.left_s - _TO_START_S
    done = bench.run(
        "-m", "benchmarks.gpu.turns", name, HAND, *modes, "--rounds", str(bench.rounds), "--seconds", f"{seconds:.0f}",
        *(("--small",) if bench.small else ()),
    )  # fmt: skip
    turns = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    kinds = (HAND, *modes)
    times = {kind: [statistics.median(turn["step_s"]) for turn in turns if _is_of(turn, kind)] for kind in kinds}
    if not times[HAND]:
        yield failed(f"{workload.title}: hand-written loop", done, error=_error_of(turns, HAND))
        return
    flops, peak = next(turn["flops"] for turn in turns if _is_of(turn, HAND)), peak_of(bench, workload.precision)
    paces = {
        kind: _pace(statistics.median(seconds), workload, flops, peak) + _memory(turns, kind)
        for kind, seconds in times.items()
        if seconds
    }
    yield f"{workload.title}: hand-written loop", "-", paces[HAND]
    for mode in modes:
        title = f"{workload.title}: trainkit, {' '.join(bench.compiled(mode))}"
        if not times[mode]:
            yield failed(title, done, error=_error_of(turns, mode))
        else:
            yield from _judged(bench, title, times, mode=mode, goal=goal, pace=paces[mode])
    if name == "gpt" and times[goal.mode]:
        yield _tokens(bench, workload, statistics.median(times[goal.mode]))


def _is_of(turn: Mapping[str, Any], kind: str) -> bool:
    return turn["kind"] == kind and "step_s" in turn


def _error_of(turns: Sequence[Mapping[str, Any]], kind: str) -> str | None:
    return next((turn["error"] for turn in turns if turn["kind"] == kind and "error" in turn), None)


def _memory(turns: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the peak of a kind in words, on a GPU."""
    peaks = [turn["peak"] for turn in turns if _is_of(turn, kind) and turn["peak"] is not None]
    return f", peak {max(peaks) / 2**30:.1f} GiB" if peaks else ""


def _judged(
    bench: Bench, title: str, times: Mapping[str, Sequence[float]], *, mode: str, goal: Goal, pace: str
) -> Iterator[Row]:
    """Yield the row of a mode beside the hand-written loop, and that of the goal's mode beside eager steps."""
    rounds = min(len(times[HAND]), len(times[mode]))
    hand, seconds = times[HAND][:rounds], times[mode][:rounds]
    ratio, shown = _median_ratio(hand, seconds), report.ratio(hand, seconds)
    if mode == goal.mode and goal.least_of_hand is not None:
        result, target = bench.judged(ratio, least=goal.least_of_hand)
        yield title, result, f"{shown} of the speed of the hand-written loop ({target}); {pace}"
        return
    yield title, "-", f"{shown} of the speed of the hand-written loop; {pace}"
    if mode == goal.mode and goal.most_of_eager is not None and times["off"]:
        rounds = min(len(times[mode]), len(times["off"]))
        seconds, eager = times[mode][:rounds], times["off"][:rounds]
        result, target = bench.judged(_median_ratio(seconds, eager), most=goal.most_of_eager)
        yield f"{title}, over eager", result, f"{report.ratio(seconds, eager)} of the time ({target})"


def _tokens(bench: Bench, workload: Workload, step_s: float) -> Row:
    """Return the row of tokens a second, which is judged on an H100."""
    rate = workload.batch * workload.units / step_s
    result, target = bench.judged(rate, least=TOKENS_A_SECOND)
    judges = "H100" in bench.device_name
    return f"{workload.title}: tokens/s", result if judges else "-", f"{rate:,.0f} ({target} on an H100)"


def large(bench: Bench, *, kind: Literal["bf16", "float8"]) -> Iterator[Row]:
    """Train a GPT of 1.3 B parameters under fsdp in a world of one, in bf16, beside a loop by hand, or with products in
    float8.
    """
    workload = WORKLOADS["gpt_large"](bench.small)
    if kind == "bf16":
        yield from _by_hand(bench, workload)
    hardware = ("hardware=laptop",) if bench.small else ()
    emulated = ("convert.emulate=true",) if bench.small else ()
    more = () if kind == "bf16" else ("convert=float8", *emulated)
    title = f"{workload.title}, fsdp in a world of one, {kind}"
    if kind == "float8" and find_spec("torchao") is None:
        yield title, "not tried", "torchao is not installed"
        return
    arguments = [*workload.overrides, *workload.sizes, *bench.compiled("default"), *hardware, *more]
    arguments += ["strategy=fsdp", *ALONE]
    with tempfile.TemporaryDirectory() as folder:
        done, rows, result = _trained(bench, Path(folder) / "run", arguments, steps=24 if bench.small else 40)
    if result is None and not (done.returncode == OVER and any("mfu" in row for row in rows)):
        yield failed(title, done)
        return
    yield from _large_rows(bench, title, rows, workload)
    title = f"{title}: memory"
    yield failed(title, done) if result is None else memory_row(bench, title, result, most=PLANNED)


def _by_hand(bench: Bench, workload: Workload) -> Iterator[Row]:
    """Yield the row of the hand-written loop, whose model is whole and compiled with the loss."""
    title, small = f"{workload.title}: hand-written loop", ("--small",) if bench.small else ()
    done = bench.run("-m", "benchmarks.gpu.turns", "gpt_large", HAND, "--rounds", "1", *small)
    turns = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    if not turns or "step_s" not in turns[0]:
        yield failed(title, done, error=_error_of(turns, HAND))
        return
    step_s, peak = statistics.median(turns[0]["step_s"]), peak_of(bench, workload.precision)
    yield title, "-", _pace(step_s, workload, turns[0]["flops"], peak) + _memory(turns, HAND)


def _large_rows(bench: Bench, title: str, rows: Sequence[Mapping[str, Any]], workload: Workload) -> Iterator[Row]:
    """Yield the row of the speed; the rows of metrics may end early, where the time of the part was over."""
    used = [row["mfu"] for row in rows if "mfu" in row]
    rate = statistics.median(row["samples_per_s"] for row in rows[-4:]) * workload.units
    if used:
        judged, target = bench.judged(statistics.median(used), least=UTILISATION)
        yield f"{title}: MFU", judged, f"{statistics.median(used):.1%} ({target}), {rate:,.0f} tokens/s"
    else:
        yield f"{title}: MFU", "-", f"the peak of {bench.device_name} is not known; {rate:,.0f} tokens/s"


def _trained(
    bench: Bench, folder: Path, overrides: Sequence[str], *, steps: int, log_every: int = 5
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]], dict[str, Any] | None]:
    """Return the process of a training, its rows of metrics, and its result; None if it did not end well."""
    at_end = ("checkpoint.every_epochs=null", "checkpoint.every_s=null")
    few = (*at_end, "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    fixed = ("recipe=null", f"steps={steps}", f"log_every_steps={log_every}", *few)
    done, result = bench.train(folder, *fixed, *overrides)
    return done, rows_of(folder), result


def _median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, base, strict=False))


def _pace(step_s: float, workload: Workload, flops: int, peak: float | None) -> str:
    unit = "tokens" if workload.units > 1 else "samples"
    text = f"{step_s * 1e3:.2f} ms a step, {workload.batch * workload.units / step_s:,.0f} {unit}/s"
    return text if peak is None else f"{text}, MFU {flops / step_s / peak:.1%}"


def peak_of(bench: Bench, precision: str) -> float | None:
    """Return the operations a second of the GPU in a precision, where conf/hardware has the GPU."""
    hardware = None if bench.small else recognised(bench.device_name)
    return None if hardware is None else hardware.peak_flops(precision)
