"""Datasets to predict on: no targets, or targets that nothing reads; and a model with two outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.numerics.generators import hash64
from trainkit.objectives.base import Loss, Model, Objective


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a table without targets: sample i is the same everywhere."""

    num_rows: int = 100
    features: int = 4

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        """Return a row."""
        generator = torch.Generator().manual_seed(hash64(index) & 0x7FFF_FFFF)
        return torch.randn(self.features, generator=generator)

    def gather(self, indices: Tensor) -> Tensor:
        """Return many rows at once: row i holds i, scaled."""
        return torch.sin(indices.double().unsqueeze(1) * torch.arange(1, self.features + 1).double()).float()


class Ragged(Rows):
    """Rows of several lengths."""

    gather: Any = None

    def __getitem__(self, index: int) -> Tensor:
        """Return a row of one or two numbers: the length changes after a batch of four."""
        return torch.ones(1 + index // 4 % 2, self.features)


class Pair(nn.Module):
    """A model with two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Linear(64, 4), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return both outputs."""
        return {"boxes": self.boxes(images.flatten(1)), "scores": self.scores(images.flatten(1))}


class OwnLoss(Objective):
    """An objective without outputs, which needs the targets."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Score one output alone."""
        outputs = model(batch[0])
        return Loss(
            loss_sum=functional.cross_entropy(outputs["scores"], batch[1], reduction="sum"), weight=len(batch[0])
        )
