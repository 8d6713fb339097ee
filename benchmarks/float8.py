"""Compare the loss curves of convert=float8 with those of bf16: the same training, products in eight bits, emulated.

python benchmarks/float8.py [--steps N] [--seeds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from trainkit import api

GPT = (
    "recipe=python_source", "model.width=64", "model.num_layers=2", "model.num_heads=4", "model.context=32",
    "data.context=32", "data.max_bytes=200000", "batch.global_size=16", "callbacks=[]", "logger=[]", "quiet=true",
    "checkpoint.export=false", "log_every_steps=1", "eval.every_epochs=null",
)  # fmt: skip
KINDS = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=bf16_mixed",),
    "tensorwise": ("precision=bf16_mixed", "convert=float8", "convert.emulate=true"),
    "rowwise": ("precision=bf16_mixed", "convert=float8", "convert.emulate=true", "convert.recipe=rowwise"),
}


def curve(kind: str, steps: int, seed: int) -> list[float]:
    """Return the training loss of each step, and last the validation loss at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        arguments = [*GPT, *KINDS[kind], f"steps={steps}", f"seed={seed}", f"eval.every_steps={steps}"]
        api.train(api.compose([*arguments, "hydra.run.dir=run"]))
        rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    return [*losses, next(row["val/loss"] for row in reversed(rows) if "val/loss" in row)]


def main() -> None:
    """Train, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    curves_of: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        for kind, curves in curves_of.items():
            curves.append(curve(kind, options.steps, seed))
            print(seed, kind, curves[-1][-1], flush=True)
    width = options.steps // 6
    ends = [width * part for part in range(1, 7)]
    rows = []
    for kind, curves in curves_of.items():
        parts = [mean(mean(curve[end - width : end]) for curve in curves) for end in ends]
        last = [curve[-1] for curve in curves]
        spread = f"{min(last):.4f} to {max(last):.4f}"
        rows.append([kind, *(f"{part:.3f}" for part in parts), f"{mean(last):.4f}", spread])
    head = ["products in", *(f"steps {end - width + 1} to {end}" for end in ends), "validation", "of the seeds"]
    report.write(
        "float8",
        "Loss of convert=float8 beside bf16's",
        f"python benchmarks/float8.py --steps {options.steps} --seeds {options.seeds}",
        "A byte-level GPT (2 layers, width 64, context 32, 16 samples a step, AdamW) on Python source, emulated "
        "on a CPU: products are of float8 numbers, computed in bf16. Mean training loss of the steps over the seeds, "
        "and the validation loss at the end.\n\n" + report.table(head, rows),
    )


if __name__ == "__main__":
    main()
