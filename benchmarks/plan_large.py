"""Time `trainkit plan` of a language model of 7 billion parameters on 1,024 GPUs, on one core of this machine.

python benchmarks/plan_large.py [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks import report

LIMIT_S = 60.0
"""Longest time of a plan on one core: seconds of a processor, which other work on this machine does not lengthen."""
MODEL = (
    "recipe=python_source", "model.vocab_size=32000", "model.width=4096", "model.num_layers=34", "model.num_heads=32",
    "model.context=2048", "data.context=2048", "batch.global_size=4096", "batch.micro_size=1", "precision=bf16_mixed",
    "activation_checkpointing=full", "callbacks=[]", "logger=[]", "hardware=h100_sxm",
)  # fmt: skip
CLUSTER = ("--hosts", "128", "--gpus-per-host", "8", "--json")
LAYOUTS = (
    "strategy=fsdp",
    "strategy=mesh strategy.replicate=128 strategy.shard=8",
    "strategy=mesh strategy.shard=128 strategy.tensor=8",
    "strategy=mesh strategy.replicate=16 strategy.shard=8 strategy.tensor=8",
    "strategy=mesh strategy.shard=16 strategy.context=8 strategy.tensor=8",
    "strategy=mesh strategy.pipe=2 strategy.shard=64 strategy.tensor=8",
)


def main() -> int:
    """Plan each layout, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows, slow = [], 0
    for layout in (layout for layout in LAYOUTS if options.only in layout):
        command = [sys.executable, "-m", "trainkit", "plan", *MODEL, *layout.split(), *CLUSTER]
        start, before = time.monotonic(), _processor_s()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall_s, core_s = time.monotonic() - start, _processor_s() - before
        slow += core_s > LIMIT_S
        print(layout, f"{core_s:.0f} s, {wall_s:.0f} s of the clock", done.stderr[-500:], file=sys.stderr, flush=True)
        if done.returncode:
            print(done.stdout[-1500:], file=sys.stderr, flush=True)
            return 1
        rows.append([f"`{layout}`", f"{core_s:.0f}", f"{wall_s:.0f}"])
    body = report.table(["layout", "seconds of a core", "of the clock"], rows)
    if not options.only:
        title = "Time of a plan of 7 billion parameters on 1,024 GPUs"
        report.write("plan_large", title, "python benchmarks/plan_large.py", body)
    else:
        print(body)
    return int(slow > 0)


def _processor_s() -> float:
    """Return the processor time of the ended processes that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
