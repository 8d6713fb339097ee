"""Measure what a collate costs: steps with `data.collate` and without it, in turns, in one process.

    python benchmarks/own_code.py [--rounds 40] [--window 50]

The samples of digits are read one by one. `stacked` is the collate of a user who does what trainkit does without one,
so that the ratio is the price of the hook: its call, its own watch over random numbers, and the count of its samples.
Each round times a window of steps of each kind, in changing order, with the same model and optimizer; the ratio of a
round is that of two windows milliseconds apart. The target is a median of at most 1.03.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import trainkit
from trainkit.cluster.tasks import Identity
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.reading.loader import Loader
from trainkit.numerics.batch import Ticket
from trainkit.run.planning.build import make_optimizer, transformed_model
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.session.restore import loader_of, make_step_context
from trainkit.strategies.base import Executor, SetupRequest

COMMON = ("recipe=null", "loader.cache=false", "callbacks=[]", "logger=[]", "steps=1000000", "log_every_steps=1000000")
KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "collate": ("data.collate=benchmarks.own_code.stacked",),
}
"""Kind of step -> its keys."""


def stacked(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Stack images and classes."""
    return torch.stack([image for image, _ in samples]), torch.stack([label for _, label in samples])


def plan_of(keys: tuple[str, ...]) -> RunPlan:
    """Return the plan of a kind of step."""
    composition = trainkit.compose([*COMMON, *keys], packages=["benchmarks"])
    return make_plan(RunConfig.from_dict(composition.values | {"name": "own_code"}))


def executor_of(plan: RunPlan) -> Executor:
    """Return the executor that both kinds of steps use."""
    model = transformed_model(plan.cfg, plan.components.strategy)
    return plan.components.strategy.setup(
        SetupRequest(
            model=model,
            identity=Identity.solo(plan.tasks[0].device),
            precision=plan.components.precision,
            numerics=plan.components.numerics,
            make_optimizer=make_optimizer(plan.cfg, model),
            training=make_step_context(plan),
            open_data=lambda _device: loader_of(plan, executor_of(plan)),
        )
    )


def window(executor: Executor, loader: Loader, first: int, steps: int) -> float:
    """Return the seconds of some steps, with the reading of their batches."""
    started = perf_counter()
    for step in range(first, first + steps):
        ticket = Ticket(step, (0,))
        executor.step(ticket, loader.fetch(ticket))
    return perf_counter() - started


def main() -> None:
    """Print the ratio of each kind of step to the plain one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--window", type=int, default=50)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with allow_packages(["benchmarks"]):
        plans = {kind: plan_of(keys) for kind, keys in KINDS.items()}
        executor = executor_of(plans["plain"])
        loaders = {kind: loader_of(plan, executor) for kind, plan in plans.items()}
        ratios: dict[str, list[float]] = {kind: [] for kind in KINDS if kind != "plain"}
        for turn in range(-2, asked.rounds):  # two rounds to settle
            order = list(KINDS) if turn % 2 else list(reversed(KINDS))
            first = (turn + 2) * asked.window
            seconds = {kind: window(executor, loaders[kind], first, asked.window) for kind in order}
            if turn >= 0:
                for kind, found in ratios.items():
                    found.append(seconds[kind] / seconds["plain"])
    for kind, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{kind}: {middle:.3f} of the plain step (quartiles {low:.3f} to {high:.3f}, {asked.rounds} rounds)")


if __name__ == "__main__":
    main()
