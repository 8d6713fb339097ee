"""The user's own map-style dataset."""

import math

import torch
from torch import Tensor


class Sides:
    """Points above and below a wave."""

    splits = ("train", "val")

    def __init__(self, split: str, count: int = 50) -> None:
        self.count = count if split == "train" else 20
        self.shift = 0.0 if split == "train" else 0.5

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = (index + self.shift) / 10
        return torch.tensor([x]), int(math.sin(x) > 0)
