"""A dataset and a callback that write down what a training reads: which samples, since which step."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from trainkit.trainer.events import Callback, Run

LOG = "TRAINKIT_TEST_READS"


def write(line: str) -> None:
    """Append a whole line, also while other processes write."""
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{line}\n")


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """37 points of two classes; every read is written down."""

    splits = ("train",)

    def __init__(self, split: str) -> None:
        self.inputs = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        write(f"read {index}")
        return self.inputs[index], int(self.inputs[index].sum() > 0)


class Start(Callback):
    """Writes down the step that a start of the run begins at."""

    def run_start(self, run: Run) -> None:
        write(f"start {run.state.step}")


def samples_by_step(log: Path, *, num_samples: int, global_size: int) -> dict[int, list[int]]:
    """The samples that each step was made of; a step that was computed again counts once, the last time."""
    per_epoch = -(-num_samples // global_size)
    by_step: dict[int, list[int]] = {}
    step = 0
    indices: list[int] = []
    for line in log.read_text().splitlines():
        event, number = line.split()
        if event == "start":
            step, indices = int(number), []
            continue
        indices.append(int(number))
        last = step % per_epoch == per_epoch - 1
        if len(indices) == (num_samples - global_size * (per_epoch - 1) if last else global_size):
            by_step[step] = indices
            step, indices = step + 1, []
    return by_step
