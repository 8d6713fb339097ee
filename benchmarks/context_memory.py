"""Measure the bytes of a GPT whose sequences are cut over 4 ranks, as fractions of one device.

python benchmarks/context_memory.py [--length 32768] [--width 32] [--blocks 2]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from tests.contract.stepping import Case
from tests.support import zoo
from tests.support.counted import bytes_of_rank
from tests.support.pool import Pool
from trainkit.models.gpt import Gpt

RANKS = 4


@dataclass(frozen=True, kw_only=True)
class LongCase(Case):
    """A language model of one long sequence."""

    length: int
    width: int
    blocks: int

    def make_model(self) -> nn.Module:
        """Make a GPT."""
        return zoo.fill(Gpt(vocab_size=64, context=self.length, num_layers=self.blocks, num_heads=1, width=self.width))

    def make_data(self) -> zoo.Sentences:
        """Make tokens by a formula."""
        data = zoo.Sentences()
        tokens = (torch.arange(self.length + 1) ** 2 % 61).unsqueeze(0)
        data.inputs, data.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return data


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()
    base = LongCase(
        task="hidden", precision="fp32", num_steps=1, global_size=1, micro_size=1, rate_scale=0.01, **vars(options)
    )
    rows, activations = list[list[str]](), list[int]()
    with Pool() as pool:
        for name, settings in {"one_device": {}, "strategy.context=4": {"shard": 1, "context": RANKS}}.items():
            case = replace(base, strategy="mesh" if settings else "one_device", settings=settings)
            job = "tests.support.counted.bytes_of_rank"
            ranks = pool.run(job, case, num_ranks=RANKS, timeout_s=3600) if settings else [bytes_of_rank(None, case)]
            lasting, peak = (max(rank[column] for rank in ranks) for column in (0, 1))
            activations.append(peak - lasting)
            sizes = [f"{size / 2**20:.1f}" for size in (lasting, peak, peak - lasting)]
            rows.append([name, *sizes, f"**{activations[-1] / activations[0]:.3f}**"])
            print(rows[-1], flush=True)
    report.write(
        "context_memory",
        f"Bytes of a GPT with a sequence of {options.length:,} tokens, cut over {RANKS} ranks",
        f"python benchmarks/context_memory.py --length {options.length} --width {options.width} "
        f"--blocks {options.blocks}",
        "SGD with momentum, float32, one sequence a step. Counted, not sampled: the bytes below every tensor that an "
        "operation makes, for as long as they are allocated (`tests/support/counting.py`), on the rank that has most. "
        "Lasting: when the update begins, parameters, gradients and optimizer state. Activations: the peak of the step "
        "without them.\n\n"
        + report.table(["", "lasting MiB", "peak MiB", "activations MiB", "of one device"], rows)
        + "\n\nTarget: at most 0.4 of the activations of one device.",
    )


if __name__ == "__main__":
    from benchmarks.context_memory import main as run  # the processes of the pool import the case from there

    run()
