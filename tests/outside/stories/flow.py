"""A normalizing flow: the density of points, by invertible layers; a sample is one tensor without a target."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.flow.Couplings, depth: 3}
data: {_target_: stories.flow.Moons}
objective: {_target_: stories.flow.NegativeLogDensity}
optimizer: {lr: 0.01}
"""


class Moons(Dataset[Tensor]):
    def __init__(self, split: str) -> None:
        angle = math.pi * torch.rand(24)
        self.points = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(24, 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class Coupling(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = points.chunk(2, dim=1)
        scale, shift = self.net(kept).chunk(2, dim=1)
        scale = scale.tanh()
        return torch.cat([moved * scale.exp() + shift, kept], dim=1), scale.squeeze(1)


class Couplings(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(depth))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(points), dtype=points.dtype, device=points.device)
        for layer in self.layers:
            points, more = layer(points)
            volume = volume + more
        return points, volume


class NegativeLogDensity(Objective):
    def loss(self, model: Model, batch: Tensor) -> Loss:
        codes, volume = model(batch)
        losses = 0.5 * codes.square().sum(1) + math.log(2 * math.pi) - volume
        return Loss(loss_sum=losses.sum(), weight=float(len(batch)))
