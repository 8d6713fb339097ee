"""Measure steps of a small convnet on one thread: trainkit with either memory format beside a hand-written loop.

    python benchmarks/memory_format.py [--rounds 7] [--steps 4]

All three take turns of a few steps in one process. What counts is the processor time of the process, which other
programs on the machine change less than the time of a clock; with one thread the two are equal on an idle machine.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import report
from benchmarks.pair import WORKLOADS
from trainkit.cluster.tasks import Identity
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import Precision
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import (
    LossWeighting,
    Numerics,
    SetupRequest,
    StepContext,
    Ticket,
    UpdateParams,
)
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms
from trainkit.strategies.model_transforms.memory_format import MemoryFormat
from trainkit.strategies.one_device import OneDevice

CONVNET = WORKLOADS["convnet"]
LEARNING_RATE = 1e-3


def plain_loop() -> Callable[[], None]:
    """Return a step of a loop as most people write it: a shuffling DataLoader, AdamW with torch's defaults."""
    model = CONVNET.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = TensorDataset(*CONVNET.make_data())

    def batches() -> Iterator[list[Tensor]]:
        while True:
            yield from DataLoader(data, batch_size=CONVNET.batch, shuffle=True)

    endless = batches()

    def step() -> None:
        inputs, targets = next(endless)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def trainkit_loop(memory_format: MemoryFormat) -> Callable[[], None]:
    """Return a step of `strategy=one_device`, with data in memory and the fused AdamW of the shipped config."""
    inputs, targets = CONVNET.make_data()
    plan = BatchPlan(num_samples=len(inputs), global_size=CONVNET.batch, micro_size=CONVNET.batch)
    training = StepContext(
        plan=plan,
        objective=Classification(),
        weighing=LossWeighting(per_sample=1.0, planned=1.0),
        rule=lambda _version: UpdateParams(lr_factor=1.0, max_norm=None),
    )
    model = apply_transforms(CONVNET.make_model(), ModelTransforms(memory_format=memory_format))
    executor = OneDevice(device="cpu").setup(
        SetupRequest(
            model=model,
            identity=Identity.solo("cpu"),
            precision=Precision(),
            numerics=Numerics(),
            make_optimizer=lambda params: torch.optim.AdamW(list(params.values()), lr=LEARNING_RATE, fused=True),
            training=training,
            open_data=lambda _device: None,  # type: ignore[arg-type, return-value] # one_device opens none
        )
    )
    numbers = count()

    def step() -> None:
        order = torch.randint(len(targets), (CONVNET.batch,))
        ticket = Ticket(next(numbers), (0,))
        executor.step(ticket, [(inputs.index_select(0, order), targets.index_select(0, order))])

    return step


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loops = {
        "hand-written loop": plain_loop(),
        "trainkit, contiguous": trainkit_loop("contiguous"),
        "trainkit, channels_last": trainkit_loop("channels_last"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(given.rounds + 1):
        for name, step in loops.items():
            began = process_time()
            for _ in range(given.steps):
                step()
            if number:  # the first round warms up
                seconds[name].append((process_time() - began) / given.steps)
    base = seconds["hand-written loop"]
    rows = [[name, f"{statistics.median(own) * 1e3:.1f}", report.ratio(own, base)] for name, own in seconds.items()]
    body = f"{CONVNET.title}, fp32, AdamW, one thread.\n\n"
    body += report.table(["", "ms of processor time a step", "of the hand-written loop: median of rounds"], rows)
    body += "\n\nTarget: at most 0.69 of the hand-written loop."
    command = f"python benchmarks/memory_format.py --rounds {given.rounds} --steps {given.steps}"
    report.write("memory_format", "Memory formats of a small convnet", command, body)


if __name__ == "__main__":
    main()
