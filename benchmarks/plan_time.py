"""Predict the time of a step on 2 and 4 replicas from one replica and a calibrated link, and measure it.

python benchmarks/plan_time.py [--only TEXT] [--steps 60]

As root, on Linux: each link is a loopback device of a network of its own, whole or limited to 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from trainkit import api
from trainkit.run.estimates.hardware import Band, Hardware, Link
from trainkit.run.estimates.outlook import StepTime, Work, rank_work, step_time, step_traffic
from trainkit.run.estimates.this_machine import measured_link
from trainkit.run.planning.plan import make_plan
from trainkit.trained.build import meta_model

COMMON = (
    "recipe=null", "quiet=true", "callbacks=[]", "logger=[]", "checkpoint.export=false", "eval.every_epochs=null",
    "eval.every_steps=null", "log_every_steps=1000", "batch.drop_last=true",
)  # fmt: skip
MODELS = {
    "mlp": ("model.hidden=[512,512]", "batch.global_size=512", "batch.micro_size=64"),
    "convnet": (
        "model=convnet", "data=synthetic", "data.shape=[1,28,28]", "data.num_samples=4096", "data.val_samples=8",
        "batch.global_size=64", "batch.micro_size=8",
    ),
    "gpt": (
        "model=gpt", "data=synthetic_tokens", "data.context=64", "data.vocab_size=256", "data.num_samples=4096",
        "objective=language_modelling", "batch.global_size=32", "batch.micro_size=4",
    ),
}  # fmt: skip
LINKS = {"full": "", "100 Mbit/s": "tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 50ms && "}
ROUNDS = 3
"""Measurements of a point, of which the median counts."""
SPREAD, TURNS = 1.1, 1.25
"""Deviation of the time of a step; slowdown of processes that take turns on a core, which share its caches."""
SHARDS = 8
"""Shards of the global batch of each model."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One training that is predicted and measured."""

    model: str
    replicas: int
    time: StepTime
    """Predicted."""
    step_s: float
    """Measured."""

    @property
    def error(self) -> float:
        """The share by which the prediction differs."""
        return self.time.step_s / self.step_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the band holds the measured time."""
        return self.time.band.low <= self.step_s <= self.time.band.high


def step_s(overrides: Sequence[str], steps: int) -> float:
    """Return the seconds of a step after the first 20, in processes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "trainkit",
            *COMMON,
            *overrides,
            f"steps={steps}",
            f"hydra.run.dir={folder}/run",
        ]
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL
        )
        result = json.loads((Path(folder) / "run/result.json").read_text())
    seconds: float = result["measured"]["at_end"]["step_s"]
    return seconds


def one_replica(model: Sequence[str], steps: int) -> tuple[float, float]:
    """Measure a step of all shards and of half of them on one device: their difference is that of the shards.

    Returns:
        Seconds of a shard, and of everything that occurs once in a step.
    """
    global_size = int(next(key for key in model if key.startswith("batch.global_size=")).partition("=")[2])
    keys = [override for override in model if not override.startswith("batch.global_size=")]
    sizes = [f"batch.global_size={global_size}", f"batch.global_size={global_size // 2}"]
    rounds = [[step_s([*keys, "strategy=one_device", size], steps) for size in sizes] for _ in range(ROUNDS)]
    whole, half = (statistics.median(column) for column in zip(*rounds, strict=True))
    shard_s = max(whole - half, 0.0) / (SHARDS / 2)
    return shard_s, max(half - shard_s * SHARDS / 2, 0.0)


def predicted(overrides: Sequence[str], seconds_of: tuple[float, float], link: Link) -> StepTime:
    """Return the planned time of a step of a training, whose operations take as long as one replica was measured."""
    plan = make_plan(api.compose([*COMMON, *overrides]).cfg)
    model = meta_model(plan.cfg)
    plan = plan.resolved(lambda: model)
    hardware = Hardware(
        name="here", memory_gib=1.0, memory_gb_s=1.0, tflops={"fp32": 1.0}, within_host=link, between_hosts=link,
        whole_host=True, operation_us=0.0, reached=Band(low=1 / SPREAD / TURNS, high=SPREAD),
    )  # fmt: skip
    shard, update = (Work(operations={(round(seconds * 1e12), 0): 1}) for seconds in seconds_of)
    work = rank_work(plan, model, shard)
    crowd = max(work.tasks_a_host // (os.cpu_count() or 1), 1)
    return step_time(replace(work, update=update, tasks_a_host=crowd), step_traffic(plan, model), hardware, "fp32")


def inside(only: str, steps: int) -> list[dict[str, object]]:
    """Measure over the loopback device of this network; return a row for each point."""
    link = measured_link(num_gpus=0)
    print(f"link: {link}", file=sys.stderr, flush=True)
    rows: list[dict[str, object]] = []
    for name, model in MODELS.items():
        if only not in name:
            continue
        alone = one_replica(model, steps)
        print(f"{name}: {alone}", file=sys.stderr, flush=True)
        for count in (2, 4):
            overrides = [*model, "strategy=mirrored", f"strategy.replicas={count}"]
            point = Point(
                model=name,
                replicas=count,
                time=predicted(overrides, alone, link),
                step_s=statistics.median(step_s(overrides, steps) for _ in range(ROUNDS)),
            )
            band = point.time.band
            row: dict[str, object] = {
                "model": name, "replicas": count, "low": band.low, "high": band.high, "planned": point.time.step_s,
                "measured": point.step_s, "error": point.error, "inside": point.is_inside,
            }  # fmt: skip
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measure over each link, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--inside", action="store_true")
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(options.only, options.steps)))
        return
    cells, errors, within = [], [], []
    for link, limit in LINKS.items():
        again = f"{sys.executable} {__file__} --inside --steps {options.steps} --only '{options.only}'"
        script = f"ip link set lo up && {limit}{again}"
        done = subprocess.run(["unshare", "-n", "sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        for row in json.loads(done.stdout):
            errors.append(abs(row["error"]))
            within.append(row["inside"])
            band = f"{row['low'] * 1e3:.1f} to {row['high'] * 1e3:.1f}"
            cells.append([
                row["model"], str(row["replicas"]), link, f"{row['planned'] * 1e3:.1f}", band,
                f"{row['measured'] * 1e3:.1f}", f"{row['error']:+.0%}",
            ])  # fmt: skip
    head = ["model", "replicas", "link", "planned ms", "band ms", "measured ms", "error"]
    body = (
        f"Median error {statistics.median(errors):.0%}; {sum(within)} of {len(within)} measured times inside the band. "
        "Planned from a step of one replica with all and with half of its shards, and from an all-reduce of two "
        "processes over the same link. Processes of one thread; the mean of the steps after the first 20.\n\n"
    )
    if not options.only:
        report.write(
            "plan_time", "Time of a step that is planned from one replica", "python benchmarks/plan_time.py",
            body + report.table(head, cells),
        )  # fmt: skip
    else:
        print(body + report.table(head, cells))


if __name__ == "__main__":
    main()
