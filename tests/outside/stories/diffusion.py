"""Diffusion: a net that predicts the noise in a point, at a random time; the objective draws noise and time."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.diffusion.Denoiser, width: 16}
data: {_target_: stories.diffusion.Ring}
objective: {_target_: stories.diffusion.NoiseError}
"""


class Ring(Dataset[Tensor]):
    def __init__(self, split: str) -> None:
        angle = 2 * math.pi * torch.rand(24)
        self.points = torch.stack([angle.cos(), angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class Denoiser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 2)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layers(torch.cat([noisy, time], dim=1)))
        return outputs


class NoiseError(Objective):
    def loss(self, model: Model, batch: Tensor) -> Loss:
        time = torch.rand(len(batch), 1, dtype=batch.dtype, device=batch.device)
        noise = torch.randn_like(batch)
        noisy = (math.pi / 2 * time).cos() * batch + (math.pi / 2 * time).sin() * noise
        error = (model(noisy, time) - noise).square().mean(dim=1)
        return Loss(loss_sum=error.sum(), weight=float(len(batch)))
