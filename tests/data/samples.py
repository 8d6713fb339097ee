"""Small datasets and settings for the tests of data loading."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import Loader
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank

CPU = torch.device("cpu")
NO_HOOKS = DataHooks()


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


PATHS = [
    pytest.param(InMemorySquares, {}, id="memory"),
    pytest.param(Squares, {"cache": True}, id="cached"),
    pytest.param(Squares, {}, id="direct"),
    pytest.param(InMemorySquares, {"cache": False}, id="uncached"),
    pytest.param(Squares, {"num_workers": 1}, id="workers"),
]
"""(dataset, keys of the loader) of every way of reading."""


class Noisy(Squares):
    """Augmented by all three global generators."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.rand(1) + index, random.random() + np.random.random()  # noqa: NPY002 - what a dataset may use


class Numbered:
    """File f holds the numbers that follow those of the files before it; notes the files that are opened."""

    def __init__(self, *sizes: int, surplus: int = 0) -> None:
        self.sizes = sizes
        self.files = [f"part-{number}" for number in range(len(sizes))]
        self.opened: list[str] = []
        self.surplus = surplus

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for file in self.files:
            yield from self.read(file)

    def read(self, file: str) -> Iterator[tuple[int, int]]:
        self.opened.append(file)
        number = self.files.index(file)
        start = sum(self.sizes[:number])
        yield from ((index, 0) for index in range(start, start + self.sizes[number] + self.surplus))


class Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the copies from the host to another device, and their bytes; notes what is copied asynchronously."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = self.num_bytes = 0
        self.async_devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, and count it."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" != result.device.type:
            self.copies += 1
            self.num_bytes += args[0].nbytes
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("non_blocking"):
            self.async_devices.append(result.device.type)
        return result


def make_loader(
    dataset: Any,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    global_size: int = 4,
    micro_size: int = 2,
    device: Any = CPU,
    hooks: DataHooks = NO_HOOKS,
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
        reading=Reading(device=device, settings=LoaderSettings(**settings), seed=7, hooks=hooks),
    )


def all_batches(loader: Loader, steps: range, shards: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    """The samples of each step, by their first column; a last short step has fewer shards."""
    samples = []
    for step in steps:
        available = shards if step % 3 != 2 else tuple(shard for shard in shards if shard == 0)
        samples.append([int(value) for batch in loader.fetch(Ticket(step, available)) for value in batch[0].flatten()])
    loader.close()
    return samples
