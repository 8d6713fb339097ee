"""Inputs that the model changes in place, one change with a gradient: neither data nor other passes may see it."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: classification, _self_]
model: {_target_: stories.inputs_in_place.Scaled}
data: {_target_: stories.inputs_in_place.points}
"""


def points(split: str) -> TensorDataset:
    del split
    return TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.mul_(0.5).add_(self.shift)
        scores: Tensor = self.layers(inputs)
        return scores
