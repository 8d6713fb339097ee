"""Several labels a sample, with metrics of torchmetrics by their `_target_`."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, Metric, Supervised, fresh_metrics

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
data: {_target_: stories.multi_label.Topics}
objective:
  _target_: stories.multi_label.Labels
  extra_metrics:
    f1: {_target_: torchmetrics.classification.MultilabelF1Score, num_labels: 3}
    ranking: {_target_: torchmetrics.classification.MultilabelRankingAveragePrecision, num_labels: 3}
"""


class Topics(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        self.texts = torch.randn(24, 6)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = self.texts[index]
        return text, (text[:3] + text[3:] > 0).long()


@dataclass(frozen=True, kw_only=True)
class Labels(Supervised):
    extra_metrics: dict[str, Any] = field(default_factory=dict)

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        losses = functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
        return Loss(loss_sum=losses, weight=float(targets.numel()), outputs=outputs, targets=targets)

    def weight_per_sample(self, sample: tuple[Tensor, Tensor]) -> float:
        return float(sample[1].numel())

    def metrics(self) -> dict[str, Metric]:
        return fresh_metrics(self.extra_metrics)
