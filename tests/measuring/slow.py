"""Datasets and models that are slow in one way, to be measured."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class SlowSamples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points of which each takes `ms` milliseconds to read."""

    def __init__(self, ms: float = 2.0, count: int = 512) -> None:
        self.ms, self.count = ms, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.ms:  # a sleep of no time gives the processor away
            time.sleep(self.ms / 1e3)
        return torch.full((4,), float(index % 7)), torch.tensor(index % 2)


class Sleepy(nn.Module):
    """A classifier whose forward pass sleeps for `ms` milliseconds."""

    def __init__(self, ms: float = 5.0) -> None:
        super().__init__()
        self.ms, self.layer = ms, nn.Linear(4, 2)

    def forward(self, points: Tensor) -> Tensor:
        time.sleep(self.ms / 1e3)
        out: Tensor = self.layer(points)
        return out


class Broken(nn.Module):
    """A classifier of digits whose scores are no numbers."""

    def __init__(self, in_features: int = 64, out_features: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, out_features)

    def forward(self, points: Tensor) -> Tensor:
        out: Tensor = self.layer(points.flatten(1))
        return out * float("nan")
