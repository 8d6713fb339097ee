"""A generative adversarial network: a critic and a generator in one model, each with its optimizer and its loss."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

from trainkit import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.gan.Gan}
data: {_target_: stories.gan.Line}
objective: {_target_: stories.gan.Game}
optimizers:
  critic: {match: ['critic.*'], lr: 0.05}
  generator: {match: ['generator.*'], ratio: 1/2}
"""


class Line(Dataset[Tensor]):
    def __init__(self, split: str) -> None:
        self.points = torch.rand(24, 1) * torch.tensor([1.0, 2.0])

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class Gan(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(), nn.Linear(width, 1))
        self.generator = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor, part: str) -> Tensor:
        outputs: Tensor = getattr(self, part)(points)
        return outputs


class Game(Objective):
    phases: ClassVar[tuple[str, ...]] = ("critic", "generator")

    def phase_loss(self, phase: str, model: Model, batch: Tensor) -> Loss:
        noise = torch.randn(len(batch), 3, dtype=batch.dtype, device=batch.device)
        if phase == "critic":
            with torch.no_grad():
                fake = model(noise, "generator")
            losses = softplus(-model(batch, "critic")) + softplus(model(fake, "critic"))
        else:
            losses = softplus(-model(model(noise, "generator"), "critic"))
        return Loss(loss_sum=losses.sum(), weight=float(len(batch)))

    def loss(self, model: Model, batch: Tensor) -> Loss:
        return self.phase_loss("critic", model, batch)
