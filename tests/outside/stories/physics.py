"""A differential equation, u'' = -u: the loss takes derivatives of the model's outputs by its inputs."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit import Access, Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.physics.Field}
data: {_target_: stories.physics.Places}
objective: {_target_: stories.physics.Equation}
"""


class Places(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str) -> None:
        self.places = 3 * torch.rand(24, 1)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"place": self.places[index], "start": torch.zeros(1), "value": torch.ones(1)}


class Field(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        values: Tensor = self.head(self.layers(points))
        return values


def slope(values: Tensor, points: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


class Equation(Objective):
    needs: ClassVar[frozenset[Access]] = frozenset({Access.derivatives})

    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        points = batch["place"].requires_grad_()
        values = model(points)
        residual = slope(slope(values, points), points) + values
        start = model(batch["start"]) - batch["value"]
        return Loss(loss_sum=residual.square().sum() + start.square().sum(), weight=float(len(points)))
