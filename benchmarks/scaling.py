"""Measure the speedup of a second process: two processes of one thread against one, trainkit and other trainers.

    python benchmarks/scaling.py [--rounds 5] [--no-peers]
    python benchmarks/scaling.py --only convnet --rounds 1 --quick      # prints, and writes nothing

Every round runs each contender once on one process and once on two, with the same number of samples per step; the
speedup is taken within the round. A run's time per step is the median of its windows of steps, so that a short
disturbance of the machine does not count. The limit is that of two processes that do not average at all, each with half
of every batch: the cost of sharing the machine. trainkit is started by its command, a peer by one process per rank,
with the same model and the fused AdamW. Peers that are not installed are left out.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from benchmarks.pair import WORKLOADS, Workload
from trainkit.config.grammar import replacing

PEERS_FILE = str(ROOT / "benchmarks" / "pair_peers.py")
TIMEOUT_S = 300.0
BASE = (
    "recipe=null", "optimizer.lr=0.001", "optimizer.groups={}", "schedule=constant", "eval.every_epochs=null",
    "checkpoint.keep_best=0", "checkpoint.every_s=null",
)  # fmt: skip
REDUCERS = ("auto", "shared_memory", "backend")
"""Values of `strategy.reduce`. The default, `auto`, uses shared memory here: both rows differ by the load only."""

Measure = Callable[[Workload, int], float]
"""Returns seconds per step of a workload, over a number of steps."""


@dataclass(kw_only=True)
class Contender:
    """A trainer, measured on one process and on two."""

    one: Measure | None
    """None: another contender measures its time on one process."""
    two: Measure
    base: str
    """The contender with whose time on one process it is compared."""
    limit: str
    """The contender without averaging, whose speedup is the limit."""
    ones: list[float] = field(default_factory=list)
    twos: list[float] = field(default_factory=list)


def peer(kind: str, processes: int) -> Measure:
    """Return a measurement of a peer on several processes; the slowest of them counts."""

    def run(workload: Workload, steps: int) -> float:
        command, port = [sys.executable, PEERS_FILE, kind, workload.key, str(steps)], _free_port()
        ranks = [_rank(rank, processes, port) for rank in range(processes)]
        return max(map(_seconds_a_step, together([command] * processes, ranks)))

    return run


def _rank(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank."""
    if processes == 1:
        return {"LOGICAL_CPUS": "1"}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "scaling", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def together(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Run commands at the same time; return their outputs. End all if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command, variables in zip(commands, environments, strict=True)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{errors[-3000:]}")
    return [output for output, _ in outputs]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _seconds_a_step(output: str) -> float:
    return float(output.rpartition("seconds a step: ")[2].split()[0])


def trainkit(*overrides: str, copies: int = 1, share: int = 1) -> Measure:
    """Return a measurement of the public command; `copies` of it at once, with a `share`-th of the batch each."""

    def run(workload: Workload, steps: int) -> float:
        sized = replacing(workload.overrides, f"batch.global_size={workload.batch // share}")
        with tempfile.TemporaryDirectory() as folder:
            commands = [
                [
                    sys.executable, "-m", "trainkit", *BASE, *sized, *overrides, f"steps={steps}",
                    f"log_every_steps={workload.window}", f"hydra.run.dir={folder}/{copy}",
                ]
                for copy in range(copies)
            ]  # fmt: skip
            together(commands, [{}] * copies)
            return max(_logged(Path(folder, str(copy))) for copy in range(copies))

    return run


def _logged(run: Path) -> float:
    """Return seconds per step: the median of the windows after the first third, from the run's own rows."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "train/loss" in row]
    measured = rows[len(rows) // 3 - 1 :]
    windows = [(later["seconds"] - row["seconds"]) / (later["step"] - row["step"]) for row, later in pairwise(measured)]
    return float(statistics.median(windows))


def contenders(*, with_peers: bool) -> dict[str, Contender]:
    """Return all contenders that can run here, by their name in the table."""
    plain, base = "plain loop, not averaging", "trainkit, not averaging"
    table = {plain: Contender(one=peer("by_hand", 1), two=peer("by_hand", 2), base=plain, limit=plain)}
    if with_peers:
        table["plain loop, DDP"] = Contender(one=None, two=peer("ddp", 2), base=plain, limit=plain)
        for name, kind in (("Lightning", "lightning"), ("Accelerate", "accelerate")):
            if find_spec(kind):
                table[name] = Contender(one=peer(kind, 1), two=peer(kind, 2), base=name, limit=plain)
        if find_spec("tensorflow"):
            kind, name = "mirrored_strategy", "Keras, MirroredStrategy"
            table[name] = Contender(one=peer(kind, 1), two=_one_process(kind), base=name, limit=plain)
    alone = trainkit("strategy=one_device", copies=2, share=2)
    table[base] = Contender(one=trainkit("strategy=one_device"), two=alone, base=base, limit=base)
    for reducer in REDUCERS:
        two = trainkit("strategy=mirrored", "strategy.replicas=2", f"strategy.reduce={reducer}")
        table[f"trainkit, mirrored, {reducer}"] = Contender(one=None, two=two, base=base, limit=base)
    return table


def _one_process(kind: str) -> Measure:
    """Return a measurement of a peer whose replicas are threads of one process."""

    def run(workload: Workload, steps: int) -> float:
        command = [sys.executable, PEERS_FILE, kind, workload.key, str(steps)]
        return _seconds_a_step(together([command], [{"LOGICAL_CPUS": "2"}])[0])

    return run


def measure(entrants: Mapping[str, Contender], workload: Workload, *, rounds: int, steps: int) -> None:
    """Measure all contenders in turns, for a number of rounds."""
    for number in range(rounds):
        for name, contender in entrants.items():
            if contender.one is not None:
                contender.ones.append(contender.one(workload, steps))
            contender.twos.append(contender.two(workload, steps))
            one_s = entrants[contender.base].ones[-1]
            text = f"{one_s * 1e3:.1f} ms, {contender.twos[-1] * 1e3:.1f} ms on two: {one_s / contender.twos[-1]:.2f}"
            print(f"round {number + 1}: {workload.title}: {name}: {text}", file=sys.stderr, flush=True)


def rows(entrants: Mapping[str, Contender]) -> list[list[str]]:
    """Return a row per contender: time on one and on two processes, speedup, and its share of the limit's."""
    table = []
    for name, contender in entrants.items():
        base_s, limit = entrants[contender.base].ones, entrants[contender.limit]
        shares = [
            (one_s / two) / (limit_one / limit_two)
            for one_s, two, limit_one, limit_two in zip(
                base_s, contender.twos, entrants[limit.base].ones, limit.twos, strict=True
            )
        ]
        table.append(
            [
                name,
                f"{statistics.median(base_s) * 1e3:.1f}",
                f"{statistics.median(contender.twos) * 1e3:.1f}",
                report.ratio(base_s, contender.twos),
                "the limit" if name == contender.limit else f"**{statistics.median(shares):.2f}**",
            ]
        )
    return table


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="half of the steps; writes nothing")
    options = parser.parse_args()
    head = ["", "ms a step, one process", "two", "speed-up: median (least to most)", "of the limit"]
    sections = []
    for workload in WORKLOADS.values():
        if options.only in (None, workload.key):
            every = contenders(with_peers=not options.no_peers)
            steps = workload.steps // (2 if options.quick else 1)
            measure(every, workload, rounds=options.rounds, steps=steps)
            sections.append(f"## {workload.title}\n\n{report.table(head, rows(every))}")
    body = "\n\n".join(sections) + "\n\nTarget: trainkit, mirrored, at least 0.90 of the limit on both."
    if options.quick or options.only:  # not the measurement of the page
        print(body)
        return
    title = "Two processes of one thread against one"
    report.write("scaling", title, f"python benchmarks/scaling.py --rounds {options.rounds}", body)


if __name__ == "__main__":
    main()
