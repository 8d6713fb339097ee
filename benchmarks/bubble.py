"""Compare the bubble of each pipeline schedule with its ideal, on stages of equal weight.

python benchmarks/bubble.py [--ranks 4] [--shards 8] [--milliseconds 50] [--rounds 5]

Two cores cannot compute four stages at once, but four stages can sleep at once: each block sleeps for a fixed time in
its forward pass and twice as long in its backward pass, as layers do. The time in which a rank waits is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from tests.contract.stepping import Case, _Rank
from tests.support import zoo
from tests.support.pool import Member, Pool

BLOCKS = 8
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved, 2 stages a rank": {"schedule": "interleaved", "virtual_stages": 2},
    "zero_bubble, 1 stage a rank": {"schedule": "zero_bubble", "virtual_stages": 1},
    "zero_bubble, 2 stages a rank": {"schedule": "zero_bubble", "virtual_stages": 2},
}


class _Sleep(torch.autograd.Function):
    """The identity; its gradient takes a fixed time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Sleeper(nn.Module):
    """A layer of fixed cost: its forward pass takes as long as the gradient of its inputs, and that of its weight."""

    draws_nothing = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep."""
        if self.training and not inputs.is_meta and type(inputs) is Tensor:
            time.sleep(self.seconds)
        if not inputs.requires_grad:  # give the first layer the cost of the others
            inputs = inputs.detach().requires_grad_()
        outputs: Tensor = _Sleep.apply(inputs, self.seconds) + _Sleep.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return outputs


@dataclass(frozen=True, kw_only=True)
class Sleeping(Case):
    """A training of equal blocks."""

    seconds: float = 0.02

    def make_data(self) -> zoo.Points:
        """Return enough points for full steps."""
        points = zoo.Points()
        points.inputs, points.targets = points.inputs[: self.global_size], points.targets[: self.global_size]
        return points

    def make_model(self) -> nn.Module:
        """Return blocks that sleep."""
        return nn.Sequential(*(Sleeper(self.seconds) for _ in range(BLOCKS)))


def bubbles(member: Member, case: Sleeping) -> list[tuple[float, float]]:
    """Return (measured, ideal) of each step on this rank, without the first two."""
    rank = _Rank(member, case)
    executor, measured = rank.setup(0), []
    for ticket in executor.tickets(rank.position, case.num_steps):
        if rank.position.step == case.num_steps:
            break
        executor.step(ticket, rank.fetch(ticket))
        rank.position.step += 1
        metrics = executor.local.step_metrics
        measured.append((metrics["pipeline/bubble"], metrics["pipeline/bubble_ideal"]))
    executor.close()
    return measured[2:]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=50)
    options = parser.parse_args()
    base = Sleeping(strategy="pipeline", precision="fp32", seconds=options.milliseconds / 1000,
                    global_size=2 * options.shards, micro_size=2, num_steps=2 + options.rounds)  # fmt: skip
    rows = []
    with Pool() as pool:
        for name, settings in SCHEDULES.items():
            case = replace(base, settings={**settings, "stages": options.ranks, "replicas": 1})
            ranks = pool.run("benchmarks.bubble.bubbles", case, num_ranks=options.ranks, timeout_s=300)
            shares = ([bubble for bubble, _ in rank] for rank in ranks)
            steps = [statistics.mean(step) for step in zip(*shares, strict=True)]
            ideal = ranks[0][0][1]
            measured = statistics.median(steps)
            spread = f"{min(steps):.3f} to {max(steps):.3f}"
            rows.append([name, f"{ideal:.3f}", f"**{measured:.3f}**", spread, f"{measured / ideal:.2f}"])
            print(rows[-1], flush=True)
    report.write(
        "bubble",
        f"The bubble of a pipeline of {options.ranks} ranks and {options.shards} microbatches",
        f"python benchmarks/bubble.py --ranks {options.ranks} --shards {options.shards} --milliseconds "
        f"{options.milliseconds:g} --rounds {options.rounds}",
        f"{BLOCKS} blocks that sleep {options.milliseconds:g} ms forwards and twice that backwards, so that ranks "
        "do not share cores. The bubble is the share of forward and backward in which a rank waits, mean over the "
        "ranks, median over the steps.\n\n"
        + report.table(["schedule", "ideal", "measured", "least to most", "measured / ideal"], rows)
        + "\n\nTarget: gpipe, 1f1b and interleaved within 15 % of the ideal.",
    )


if __name__ == "__main__":
    from benchmarks import bubble  # ranks import its classes by this name

    bubble.main()
