"""Distillation: a frozen teacher of one's own scores the same samples; a shipped objective compares the scores."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: distillation, _self_]
model: {_target_: stories.distillation.Student, width: 6}
data: {_target_: stories.distillation.Points}
objective: {teacher: {_target_: stories.distillation.Teacher}, temperature: 2.0, share: 0.7}
"""


class Points(Dataset[tuple[Tensor, int]]):
    def __init__(self, split: str) -> None:
        self.points = torch.randn(24, 4)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.points[index].argmax())


class Teacher(nn.Module):
    """Its weights are its own, as those of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)
        nn.init.eye_(self.scores.weight)
        nn.init.zeros_(self.scores.bias)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = 3 * self.scores(points)
        return scores


class Student(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores
