"""Time the steps of a training in turns: by a hand-written loop, and by trainkit in some compile modes.

    python -m benchmarks.gpu.turns gpt hand default off [--rounds 3] [--seconds 300] [--small]

One process trains all, so that no turn has to start one. Each line of its output is JSON: a kind, the seconds a step of
its windows, floating-point operations of a step (of the hand-written loop) and peak bytes of the device; or an error.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.gpu import by_hand
from benchmarks.gpu.bench import QUIET, Bench, rows_of
from benchmarks.gpu.workloads import WORKLOADS, Workload
from trainkit import api

HAND = "hand"
_FIXED = (
    *QUIET, "recipe=null", "callbacks=[]", "strategy=one_device", "checkpoint.every_epochs=null",
    "checkpoint.every_s=null",
)  # fmt: skip


def turn(kind: str, workload: Workload, bench: Bench, device: torch.device) -> dict[str, Any]:
    """Train once; return what is printed."""
    torch.compiler.reset()  # no graph of another turn
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    flops = None
    if kind == HAND:
        step_s, flops = by_hand.train(workload, device, steps=workload.steps, window=workload.window)
    else:
        step_s = by_trainkit(workload, bench.compiled(kind))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"kind": kind, "step_s": step_s, "flops": flops, "peak": peak}


def by_trainkit(workload: Workload, more: tuple[str, ...]) -> list[float]:
    """Train with trainkit; return the seconds a step of each window after the first third of the steps."""
    fixed = (*_FIXED, f"steps={workload.steps}", f"log_every_steps={workload.window}")
    composition = api.compose([*fixed, *workload.overrides, *workload.sizes, *more])
    with tempfile.TemporaryDirectory() as folder:
        api.train(composition, run_dir=Path(folder) / "run")
        stamps = [(row["step"], row["seconds"]) for row in rows_of(Path(folder) / "run")]
    timed = [stamp for stamp in stamps if stamp[0] >= workload.steps // 3]
    return [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in itertools.pairwise(timed)]


def main() -> None:
    """Train by turns, and print a line of JSON for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("kinds", nargs="+", help=f"{HAND}, or compile modes of trainkit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="no round begins that would end later")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    bench = Bench(small=options.small, deadline=time.monotonic() + options.seconds)
    workload = WORKLOADS[options.workload](options.small)
    device = torch.device("cpu" if options.small else "cuda")
    took_s = 0.0
    for _ in range(options.rounds):
        if bench.left_s < 1.2 * took_s:
            break  # the rounds so far are reported
        start = time.monotonic()
        for kind in options.kinds:
            try:
                line = turn(kind, workload, bench, device)
            except Exception as error:  # noqa: BLE001 - the other kinds are worth their time
                line = {"kind": kind, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(line), flush=True)
        took_s = time.monotonic() - start


if __name__ == "__main__":
    main()
