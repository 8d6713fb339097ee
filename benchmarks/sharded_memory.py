"""Measure the bytes on each rank of a GPT whose state is sharded over 4, as fractions of one device.

python benchmarks/sharded_memory.py [--blocks 24] [--width 416]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from tests.contract.stepping import Case
from tests.support.counted import bytes_of_rank
from tests.support.pool import Pool

RANKS = 4
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"replicas": RANKS}),
    "fsdp, sync=last, two shards a step": ("fsdp", {"replicas": RANKS, "sync": "last"}),
    "fsdp, replicate=2": ("fsdp", {"replicas": RANKS, "replicate": 2}),
    "fsdp, reshard_after_forward=false": ("fsdp", {"replicas": RANKS, "reshard_after_forward": False}),
    "pipeline": ("pipeline", {"stages": RANKS, "replicas": 1}),
}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=416)
    parser.add_argument("--num-steps", type=int, default=3)
    options = parser.parse_args()
    model = {"width": options.width, "num_layers": options.blocks, "bias": False}
    base = Case(
        task="gpt",
        optimizer="adamw",
        precision="fp32",
        num_steps=options.num_steps,
        global_size=8,
        micro_size=1,
        model=model,
    )
    one_lasting, one_peak = bytes_of_rank(None, base)
    rows = [["one_device", f"{one_lasting / 2**20:.1f}", f"{one_peak / 2**20:.1f}", "1", "1"]]
    with Pool() as pool:
        for name, (strategy, settings) in PLACES.items():
            case = replace(base, strategy=strategy, settings=settings)
            ranks = pool.run("tests.support.counted.bytes_of_rank", case, num_ranks=RANKS, timeout_s=600)
            lasting, peak = (max(rank[column] for rank in ranks) for column in (0, 1))
            fractions = [f"**{lasting / one_lasting:.3f}**", f"**{peak / one_peak:.3f}**"]
            rows.append([name, f"{lasting / 2**20:.1f}", f"{peak / 2**20:.1f}", *fractions])
            print(rows[-1], flush=True)
    params = sum(param.numel() for name, param in base.make_model().named_parameters() if "blocks" in name)
    report.write(
        "sharded_memory",
        f"Bytes of a GPT of {options.blocks} blocks, {params / 1e6:.1f} M parameters in them, cut over {RANKS} ranks",
        f"python benchmarks/sharded_memory.py --blocks {options.blocks} --width {options.width}",
        "AdamW, float32, 8 sequences of 5 tokens a step. Counted, not sampled: the bytes below every tensor that an "
        "operation makes, for as long as they are allocated (`tests/support/counting.py`), on the rank that has most. "
        "Lasting: when the update begins, parameters, gradients and optimizer state. Peak: the most of a whole step, "
        "activations and what is gathered included.\n\n"
        + report.table(["", "lasting MiB", "peak MiB", "lasting / one device", "peak / one device"], rows)
        + f"\n\nTargets: fsdp lasting at most 0.26, peak at most 0.26 + 1/{options.blocks} = "
        f"{0.26 + 1 / options.blocks:.3f}; pipeline at most 0.35.",
    )


if __name__ == "__main__":
    main()
