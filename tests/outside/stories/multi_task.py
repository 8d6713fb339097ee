"""Several tasks: one body, a head that classifies and one that measures, and a sum of two losses."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, MeanOf, Metric, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.multi_task.TwoHeads}
data: {_target_: stories.multi_task.Shapes}
objective: {_target_: stories.multi_task.KindAndSize, size_weight: 0.3}
"""


class Shapes(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str) -> None:
        self.features = torch.randn(24, 5)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        features = self.features[index]
        return {"features": features, "kind": features[:3].argmax(), "size": features[3:].sum()}


class TwoHeads(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Dropout(0.2))
        self.kind = nn.Linear(width, 3)
        self.size = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        hidden = self.body(features)
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(1)}


class KindAndSize(Objective):
    term_names: ClassVar[tuple[str, ...]] = ("kind_loss", "size_loss")  # logged beside the loss

    def __init__(self, size_weight: float) -> None:
        self.size_weight = size_weight

    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        outputs = model(batch["features"])
        kinds = functional.cross_entropy(outputs["kind"], batch["kind"], reduction="sum")
        sizes = functional.mse_loss(outputs["size"], batch["size"], reduction="sum")
        return Loss.of_terms(
            {"kind_loss": kinds, "size_loss": sizes},
            weight=float(len(batch["kind"])),
            factors={"size_loss": self.size_weight},
            outputs=outputs["kind"],
            targets=batch["kind"],
        )

    def metrics(self) -> dict[str, Metric]:
        return {"kinds": MeanOf(lambda scores, kinds: ((scores.argmax(1) == kinds).sum(), len(kinds)))}
