"""Small datasets and settings for the tests of data loading."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import Loader
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank

CPU = torch.device("cpu")


class Squares:
    """Sample i is (i, i squared)."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        self.reads += 1
        return torch.tensor([float(index)]), index * index


class InMemorySquares(Squares):
    """The same, offered whole."""

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.arange(self.count)
        return numbers.float().unsqueeze(1), numbers * numbers


class Noisy(Squares):
    """Augmented by all three global generators."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.rand(1) + index, random.random() + np.random.random()  # noqa: NPY002 - what a dataset may use


def make_loader(
    dataset: Any,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    global_size: int = 4,
    micro_size: int = 2,
    device: Any = CPU,
    **settings: Any,
) -> Loader:
    """A loader of steps of 4 samples by default, seed 7, three epochs."""
    plan = BatchPlan(num_samples=len(dataset), global_size=global_size, micro_size=micro_size)

    def shards_at(step: int) -> tuple[int, ...]:
        return shards_of_rank(plan.num_shards(step), rank=rank, num_ranks=num_ranks, lanes=None)

    return Loader(
        dataset,
        plan=plan,
        shards_at=shards_at,
        num_steps=3 * plan.steps_per_epoch,
        reading=Reading(device=device, settings=LoaderSettings(**settings), seed=7),
    )


def all_batches(loader: Loader, steps: range, shards: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    """The samples of each step, by their first column; a last short step has fewer shards."""
    found = []
    for step in steps:
        own = shards if step % 3 != 2 else tuple(shard for shard in shards if shard == 0)
        found.append([int(value) for batch in loader.fetch(Ticket(step, own)) for value in batch[0].flatten()])
    loader.close()
    return found
