"""Measure the traffic between two hosts: bytes per step, and the time of a step on a slow link.

    python benchmarks/wire.py [--quick]

Two network namespaces with an address each stand for two hosts (this needs root and iproute2). trainkit is started on
both by its command. Bytes are counted by the kernel on the link, in both directions, including packet headers:
the difference of a long and a short run, so that initial exchanges do not count. The slow link is the same link behind
`tc`'s token bucket of 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest

from benchmarks import report
from benchmarks.pair import WORKLOADS
from tests.launchers.two_hosts import Host, two_hosts

PLOT = ROOT / "docs" / "images" / "bandwidth_wall.png"
MBIT_PER_S = 100
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
BASE = (
    "recipe=null", "optimizer=sgd", "optimizer.lr=0.01", "schedule=constant", "eval.every_epochs=null", "callbacks=[]",
    "logger=[]", "checkpoint.keep_best=0", "checkpoint.every_s=null", "quiet=true",
)  # fmt: skip
MIRRORED = "strategy=multi_worker_mirrored"
WAYS: Mapping[str, tuple[str, ...]] = {
    "float32": (MIRRORED,),
    "bf16": (MIRRORED, "strategy.compression=bf16"),
    "fp16": (MIRRORED, "strategy.compression=fp16"),
    "powersgd, rank 1": (MIRRORED, "strategy.compression=powersgd", "strategy.powersgd_after=2"),
    "local_sgd, every 8 steps": ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=8"),
}
"""The ways of exchange, by their name in tables and plot."""
LOOKUP = (
    f"--config-dir={ROOT / 'benchmarks' / 'conf'}", "--allow-package=benchmarks", "model=lookup", "data=bags",
    "batch.global_size=32",
)  # fmt: skip
WALL = tuple(name for name in WAYS if name != "fp16")
"""The ways that differ on the slow link."""
WIDTHS = (64, 256, 512, 1024)
"""Widths of the two hidden layers whose gradients cross the slow link."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a run on two hosts."""

    wire_bytes: int
    """Bytes on the link, in both directions."""
    step_s: float
    """Seconds per step after the first third."""
    density: float | None
    """Density of sparse gradients, if there are any."""


def train(hosts: Sequence[Host], overrides: Sequence[str], *, steps: int, port: int) -> Run:
    """Run on both hosts."""
    spec = f"cluster.worker=[{','.join(f'{host.address}:{port}' for host in hosts)}]"
    before = counted(hosts[0])
    with tempfile.TemporaryDirectory() as folder:
        command = (
            sys.executable, "-m", "trainkit", *BASE, *overrides, f"steps={steps}", f"log_every_steps={steps // 3}",
            "cluster=spec", spec, "hydra.run.dir=run",
        )  # fmt: skip
        started = [
            subprocess.Popen(
                host.command(*command, f"cluster.task=worker:{index}"),
                cwd=folder,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, host in enumerate(hosts)
        ]
        try:
            outputs = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (_, errors) in zip(started, outputs, strict=True):
            if process.returncode:
                raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{errors[-3000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    first, last = rows[0], rows[-1]
    step_s = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return Run(wire_bytes=counted(hosts[0]) - before, step_s=step_s, density=last.get("sparse_density"))


def counted(host: Host) -> int:
    """Return the bytes that have crossed its link."""
    files = [f"/sys/class/net/{host.cable}/statistics/{way}_bytes" for way in ("tx", "rx")]
    done = subprocess.run(host.command("cat", *files), check=True, capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


def slow_down(hosts: Sequence[Host]) -> None:
    """Limit the link to 100 Mbit/s in both directions."""
    for host in hosts:
        rule = ("root", "tbf", "rate", f"{MBIT_PER_S}mbit", "burst", "256kbit", "latency", "50ms")
        subprocess.run(host.command("tc", "qdisc", "add", "dev", host.cable, *rule), check=True)


def bytes_a_step(
    hosts: Sequence[Host], overrides: Sequence[str], ports: Iterator[int], steps: int
) -> tuple[Run, float]:
    """Return the longer of two runs, and the bytes per step by which it exceeds the shorter."""
    short = train(hosts, overrides, steps=steps, port=next(ports))
    long = train(hosts, overrides, steps=3 * steps, port=next(ports))
    return long, (long.wire_bytes - short.wire_bytes) / (2 * steps)


def ways_table(hosts: Sequence[Host], ports: Iterator[int], steps: int) -> str:
    """Return a table of the bytes per step of the GPT for each way of exchange."""
    gpt, rows, dense = WORKLOADS["gpt"], [], 0.0
    for name, overrides in WAYS.items():
        _, size = bytes_a_step(hosts, (*gpt.overrides, *overrides), ports, steps)
        dense = dense or size
        rows.append([name, f"{size:,.0f}", f"**{size / dense:.3f}**"])
        print(f"{name}: {size:,.0f} bytes a step, {size / dense:.3f}", file=sys.stderr, flush=True)
    parameters = sum(parameter.numel() for parameter in gpt.make_model().parameters())
    text = f"{gpt.title}: {parameters:,} parameters, {4 * parameters:,} bytes of gradients."
    return f"{text} Target: bf16 at most 0.51.\n\n{report.table(['', 'bytes a step', 'of float32'], rows)}"


def sparse_table(hosts: Sequence[Host], ports: Iterator[int], steps: int) -> str:
    """Return a table of the bytes per step of a lookup table with dense and with sparse gradients."""
    _, dense = bytes_a_step(hosts, (*LOOKUP, MIRRORED, "model.sparse=false"), ports, steps)
    run, sparse = bytes_a_step(hosts, (*LOOKUP, MIRRORED, "model.sparse=true"), ports, steps)
    density = run.density or 0.0
    rows = [
        ["dense", f"{dense:,.0f}", "1", ""],
        ["sparse", f"{sparse:,.0f}", f"**{sparse / dense:.4f}**", f"{2 * density:.4f}"],
    ]
    print(f"sparse: {sparse:,.0f} of {dense:,.0f} bytes a step, density {density:.4f}", file=sys.stderr, flush=True)
    text = f"A table of 20,000 x 64 and a linear layer, 512 words a step; density of the gradient {density:.4f}."
    head = ["gradients", "bytes a step", "of dense", "target: 2 x density"]
    return f"{text}\n\n{report.table(head, rows)}"


def wall(hosts: Sequence[Host], ports: Iterator[int], steps: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (MiB of float32 gradients, ms per step) for each way of exchange, over the slow link."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in WALL}
    for width in WIDTHS:
        size = 4 * (width * (64 + width + 10) + 2 * width + 10) / 2**20
        model = ("model=mlp", f"model.hidden=[{width},{width}]", "data=digits", "batch.global_size=16")
        for name in WALL:
            overrides = (*model, *WAYS[name])
            runs = [train(hosts, overrides, steps=steps, port=next(ports)) for _ in range(rounds)]
            points[name].append((size, 1e3 * statistics.median(run.step_s for run in runs)))
            print(f"{name}: {size:.2f} MiB, {points[name][-1][1]:.1f} ms a step", file=sys.stderr, flush=True)
    return points


def wall_table(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a table of the points of the plot."""
    sizes = [size for size, _ in next(iter(points.values()))]
    rows = [[name, *(f"{seconds:.0f}" for _, seconds in line)] for name, line in points.items()]
    rows.append(["the wire alone, float32", *(f"{size * 2**20 * 8 / MBIT_PER_S / 1e3:.0f}" for size in sizes)])
    return report.table(["ms a step", *(f"{size:.2f} MiB" for size in sizes)], rows)


def draw(points: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw the plot of the bandwidth wall."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, line in points.items():
        axes.plot([size for size, _ in line], [seconds for _, seconds in line], marker="o", label=name)
    sizes = [size for size, _ in next(iter(points.values()))]
    alone = [size * 2**20 * 8 / MBIT_PER_S / 1e3 for size in sizes]
    axes.plot(sizes, alone, color="0.6", linestyle="--", label="the wire alone, float32")
    axes.set(xscale="log", yscale="log", xlabel="gradients in float32 (MiB)", ylabel="step (ms)")
    axes.set_title(f"Two hosts, {MBIT_PER_S} Mbit/s between them")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    """Measure, print, draw and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="runs of each point of the wall")
    parser.add_argument("--quick", action="store_true", help="fewer steps, one round; prints, and writes nothing")
    options = parser.parse_args()
    steps, rounds = (8, 1) if options.quick else (24, options.rounds)
    ports = itertools.count(29500)
    with two_hosts() as hosts:
        ways, sparse = ways_table(hosts, ports, steps), sparse_table(hosts, ports, steps)
        slow_down(hosts)
        points = wall(hosts, ports, steps, rounds)
    runs = "one run" if rounds == 1 else f"the median of {rounds} runs"
    text = f"An MLP of two hidden layers, batch 16, over {MBIT_PER_S} Mbit/s; each figure is {runs}."
    body = "\n\n".join(
        [
            "Two ranks, each on a host of its own. Bytes on the cable, both directions, headers included.",
            f"## Compression\n\n{ways}",
            f"## Sparse gradients\n\n{sparse}",
            f"## The bandwidth wall\n\n{text}\n\n{wall_table(points)}",
        ]
    )
    if options.quick:
        print(body)
        return
    draw(points)
    body += "\n\n![step time against the size of the gradients](../../docs/images/bandwidth_wall.png)"
    report.write("wire", "What goes over the wire", f"python benchmarks/wire.py --rounds {options.rounds}", body)


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as reason:
        sys.exit(f"not measured: {reason}")
