"""Triplets: a sample is a tuple of three, and the model, called three times, must bring two of them together."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.triplets.Embedder}
data: {_target_: stories.triplets.Faces}
objective: {_target_: stories.triplets.TripletMargin, margin: 0.5}
"""


class Faces(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        self.people = torch.randn(12, 5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        person, other = self.people[index % 12], self.people[(index + 1) % 12]
        return person + 0.1 * torch.randn(5), person + 0.1 * torch.randn(5), other


class Embedder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))

    def forward(self, face: Tensor) -> Tensor:
        embedding: Tensor = self.layers(face)
        return embedding


class TripletMargin(Objective):
    def __init__(self, margin: float) -> None:
        self.margin = margin

    def loss(self, model: Model, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        person, same, other = map(model, batch)
        losses = functional.triplet_margin_loss(person, same, other, margin=self.margin, reduction="none")
        return Loss(loss_sum=losses.sum(), weight=float(len(losses)))
