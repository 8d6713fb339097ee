"""The part of a first contact that looks at exchanges beside backward passes: a count a precision, and a picture."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.bench import ALONE, Bench, Row, failed
from benchmarks.gpu.workloads import WORKLOADS

PRECISIONS: Final = ("bf16_mixed", "bf16", "fp32")
_BACKWARD: Final = "autograd::engine::evaluate_function"
_EXCHANGE: Final = "c10d::allreduce_"
_UPDATE: Final = "aten::_fused_adamw_"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A call on the host, or a kernel, with its times in microseconds."""

    name: str
    start: float
    stop: float
    lane: str
    """Where it is drawn: a kind of call of the host, or a stream of the device."""


def overlap(bench: Bench) -> Iterator[Row]:
    """Count exchanges that begin inside of backward, and draw a step of the first precision."""
    workload = WORKLOADS["gpt"](bench.small)
    picture, bucket = bench.out / "overlap.png", 0.05 if bench.small else 25.0
    for precision in bench.selected(PRECISIONS):
        title = f"{workload.title}, mirrored in a group of one, {precision}"
        sizes = (*workload.sizes[:-1], f"precision={precision}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            done, result = bench.train(
                folder, "recipe=null", "strategy=mirrored", *ALONE, f"strategy.bucket_mb={bucket}", "steps=16",
                "callbacks=[profiler]", "checkpoint.every_epochs=null", *workload.overrides, *sizes,
            )  # fmt: skip
            if result is None:
                yield failed(title, done)
                continue
            spans = spans_of(json.loads((folder / "profile/trace.json").read_text())["traceEvents"])
        steps = steps_of(spans)
        inside, count = inside_backward(steps[-1])
        judged, target = bench.judged(count - inside, most=1)
        text = f"{inside} of {count} exchanges of a step begin inside of backward ({target} outside)"
        if precision == PRECISIONS[0]:
            draw(steps[-1], picture, title=f"{title}: {inside} of {count} exchanges begin inside of backward")
            text += f"; {picture.name}"
        yield title, judged if count > 1 else "FAILED", text


def spans_of(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the calls and kernels of a trace that matter here, in the order of their begin."""
    spans = []
    for event in events:
        if event.get("ph") != "X":
            continue
        name, category = str(event["name"]), event.get("cat")
        lanes = {_BACKWARD: "host: backward", _EXCHANGE: "host: exchange", _UPDATE: "host: update"}
        lane = next((lane for begin, lane in lanes.items() if name.startswith(begin)), None)
        if category in ("kernel", "gpu_memcpy"):
            lane = f"device: stream {event['args'].get('stream')}"
        if lane is not None and (category != "user_annotation"):
            start = float(event["ts"])
            spans.append(Span(name=name, start=start, stop=start + float(event["dur"]), lane=lane))
    return sorted(spans, key=lambda span: span.start)


def steps_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of each whole step: from the end of an update to that of the next one."""
    updates = [span.stop for span in spans if span.name.startswith(_UPDATE)]
    steps = [[span for span in spans if begin <= span.start < end] for begin, end in pairwise(updates)]
    return [step for step in steps if any(span.name.startswith(_EXCHANGE) for span in step)]


def inside_backward(step: Sequence[Span]) -> tuple[int, int]:
    """Return how many exchanges of a step begin before its last backward pass ends, and how many there are."""
    last = max(span.start for span in step if span.name.startswith(_BACKWARD))
    begins = [span.start for span in step if span.name.startswith(_EXCHANGE)]
    return sum(start <= last for start in begins), len(begins)


def draw(step: Sequence[Span], path: Path, *, title: str) -> None:
    """Draw the calls and kernels of a step, a line for each lane."""
    from matplotlib.figure import Figure

    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in step:
        lanes[span.lane].append(span)
    origin = min(span.start for span in step)
    figure = Figure(figsize=(12, 1 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted(lanes, reverse=True)
    for row, spans in enumerate(lanes[name] for name in names):
        exchanges = [span for span in spans if "allreduce" in span.name.lower() or "nccl" in span.name.lower()]
        for kind, colour in ((spans, "tab:blue"), (exchanges, "tab:orange")):
            bars = [((span.start - origin) / 1e3, max(span.stop - span.start, 1.0) / 1e3) for span in kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("milliseconds; exchanges in orange")
    axes.set_title(title, fontsize="small")
    figure.savefig(path, dpi=120)
