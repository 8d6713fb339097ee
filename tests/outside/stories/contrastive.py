"""Contrastive learning: two augmented views of a sample find each other among all views of the shard."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.contrastive.Encoder}
data: {_target_: stories.contrastive.TwoViews, noise: 0.2}
objective: {_target_: stories.contrastive.InfoNce, temperature: 0.2}
"""


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str, noise: float) -> None:
        self.samples, self.noise = torch.randn(24, 6), noise

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        return sample + self.noise * torch.randn(6), sample + self.noise * torch.randn(6)


class Encoder(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, samples: Tensor) -> Tensor:
        return functional.normalize(self.layers(samples), dim=1)


class InfoNce(Objective):
    couples_samples: ClassVar[bool] = True

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def loss(self, model: Model, batch: tuple[Tensor, Tensor]) -> Loss:
        one, other = model(torch.cat(batch)).chunk(2)
        scores = one @ other.T / self.temperature
        pairs = torch.arange(len(one), device=one.device)
        loss_sum = functional.cross_entropy(scores, pairs, reduction="sum")
        return Loss(loss_sum=loss_sum, weight=float(len(one)), outputs=scores, targets=pairs)
