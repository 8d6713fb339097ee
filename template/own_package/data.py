"""The data: any class with a length and samples by index. A class that takes `split` is built once for each split."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on two spirals, with noise. A sample is (point, spiral): a (2,) tensor, and 0 or 1."""

    splits = ("train", "val")

    def __init__(self, split: str, count: int = 512, noise: float = 0.03) -> None:
        draws = torch.Generator().manual_seed(self.splits.index(split))
        self.spirals = torch.arange(count) % 2
        radius = torch.rand(count, generator=draws).sqrt()
        angle = 3 * math.pi * radius + math.pi * self.spirals
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + noise * torch.randn(count, 2, generator=draws)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.spirals[index])
