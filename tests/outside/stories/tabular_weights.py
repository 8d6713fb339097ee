"""A table with weights: each row counts as much as its weight says; the metrics are weighted in the same way."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Collective, Loss, Metric, Model, Objective, RunningMean

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.tabular_weights.TableNet}
data: {_target_: stories.tabular_weights.Survey}
objective: {_target_: stories.tabular_weights.WeightedRows}
clip: {max_norm: 0.5}
"""


@dataclass
class Row:
    numbers: Tensor
    kind: int
    weight: float
    bought: int


class Survey(Dataset[Row]):
    def __init__(self, split: str) -> None:
        self.numbers, self.kinds, self.weights = torch.randn(30, 3), torch.randint(4, (30,)), 3 * torch.rand(30)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        numbers, kind = self.numbers[index], int(self.kinds[index])
        return Row(numbers, kind, float(self.weights[index]), int(numbers.sum() + kind > 1.5))


class TableNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.kinds = nn.Embedding(4, 2)
        self.layers = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        scores: Tensor = self.layers(torch.cat([numbers, self.kinds(kinds)], dim=1)).squeeze(1)
        return scores


class WeightedHits(Metric):
    def __init__(self) -> None:
        self.hits = RunningMean()

    def update(self, loss: Loss, batch: dict[str, Tensor]) -> None:
        right = (loss.outputs > 0) == (loss.targets == 1)
        self.hits.add((batch["weight"] * right).sum(), batch["weight"].sum())

    def compute(self, collective: Collective) -> float:
        return self.hits.mean(collective)


class WeightedRows(Objective):
    def weight_per_sample(self, sample: object) -> None:
        """The weights are a column of the table."""

    def planned_weight_per_sample(self, sample: object) -> float:
        return 1.5

    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        scores, bought = model(batch["numbers"], batch["kind"]), batch["bought"]
        weight = batch["weight"].to(scores.dtype)  # prove compares in fp64
        losses = functional.binary_cross_entropy_with_logits(scores, bought.to(scores.dtype), reduction="none")
        return Loss(loss_sum=(weight * losses).sum(), weight=weight.sum(), outputs=scores, targets=bought)

    def metrics(self) -> dict[str, Metric]:
        return {"hits": WeightedHits()}
