"""Show the results of the finders: lines for the terminal, and the JSON of `trainkit find --json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from trainkit.measuring.lr_curve import LrCurve, rounded
from trainkit.measuring.micro_sizes import TIE, MicroSizeSearch, Size
from trainkit.measuring.range_test import RangeResult
from trainkit.measuring.showing import VERSION, machine, plain
from trainkit.report.numbers import figure, share
from trainkit.report.tables import row_lines
from trainkit.storage import num_bytes

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
        "version": VERSION,
        "command": command,
        "date": _now(),
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
        "version": VERSION,
        "command": command,
        "date": _now(),
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
            "from .. to": _range,
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


def _range(one: Size) -> str:
    spread = one.choice.samples_per_s
    return "" if spread is None else f"{figure(spread.low)} .. {figure(spread.high)}"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
