"""Measure whether splitting a model pays: the same deep network on one device, mirrored, device map and pipeline.

    python benchmarks/split.py [--rounds 3] [--epochs 3]

Two processes of one thread stand for two devices; a device map, which is one process, has one thread as well. Every
round trains each once, with the public command, the same batch and the same shards, and so the same numbers. A run's
time per step is the median of its logged windows. With two GPUs or more, the devices are GPUs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import report

LAYERS, WIDTH = 12, 512
GPUS = torch.cuda.device_count() >= 2
HALVES = (f"layers.0-{LAYERS - 1}:{0 if GPUS else 'cpu'}", f"rest:{1 if GPUS else 'cpu'}")
TRAINING = (
    "recipe=null", "model=mlp", f"model.hidden={[WIDTH] * LAYERS}", "data=digits", "optimizer=adamw",
    "optimizer.lr=0.0005", "warmup.steps=20", "batch.global_size=64", "batch.micro_size=8", "log_every_steps=5",
    "checkpoint.keep_best=0", "precision=fp32",
)  # fmt: skip
PLACES = {
    "one device": ("strategy=one_device",),
    "mirrored, 2 replicas": ("strategy=mirrored", "strategy.replicas=2"),
    "device map, 2 halves": ("strategy=device_map", f"strategy.map={{{','.join(HALVES)}}}"),
    "pipeline, 2 stages, gpipe": ("strategy=pipeline", "strategy.schedule=gpipe"),
    "pipeline, 2 stages, 1f1b": ("strategy=pipeline", "strategy.schedule=1f1b"),
}


def train(overrides: tuple[str, ...], epochs: int) -> tuple[float, float]:
    """Return seconds per step, and the validation accuracy at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "trainkit", *TRAINING, *overrides, f"epochs={epochs}", f"hydra.run.dir={run}"]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
    logged = [row for row in rows if "train/loss" in row][1:]
    windows = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(logged)]
    return statistics.median(windows), float(result["metrics"]["val/accuracy"])


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in PLACES}
    accuracy: dict[str, float] = {}
    for number in range(options.rounds):
        for name, overrides in PLACES.items():
            seconds, accuracy[name] = train(overrides, options.epochs)
            times[name].append(seconds)
            print(f"round {number + 1}: {name}: {seconds * 1e3:.1f} ms a step", file=sys.stderr, flush=True)
    rows = [
        [
            name,
            f"{statistics.median(seconds) * 1e3:.1f}",
            report.ratio(seconds, times["one device"]),
            f"{accuracy[name]:.4f}",
        ]
        for name, seconds in times.items()
    ]
    head = ["", "ms a step", "ratio to one device: median (least to most)", "validation accuracy"]
    where = "two GPUs" if GPUS else "processes of one thread on the CPU"
    report.write(
        "split",
        f"An MLP of {LAYERS} layers of {WIDTH}, on digits: one device, two copies, two halves",
        f"python benchmarks/split.py --rounds {options.rounds} --epochs {options.epochs}",
        f"On {where}; {options.epochs} epochs, batch 64 in 8 shards, AdamW.\n\n{report.table(head, rows)}",
    )


if __name__ == "__main__":
    main()
