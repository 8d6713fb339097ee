"""Segmentation: a class for each pixel; batch statistics over the shard; the mean intersection over union."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Collective, Loss, Metric, Supervised

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.segmentation.Segmenter}
data: {_target_: stories.segmentation.Squares}
objective: {_target_: stories.segmentation.PixelClasses}
"""


class Squares(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        corners = torch.randint(0, 4, (24, 2)).tolist()
        self.masks = torch.zeros(24, 8, 8, dtype=torch.int64)
        for mask, (row, column) in zip(self.masks, corners, strict=True):
            mask[row : row + 4, column : column + 4] = 1
        self.images = self.masks[:, None] + 0.3 * torch.randn(24, 1, 8, 8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]


class Segmenter(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, 2, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.up(self.down(images))
        return scores


class Overlap(Metric):
    """The mean over classes of intersection over union, from counts over all pixels."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2, 2, dtype=torch.float64)

    def update(self, loss: Loss, batch: object) -> None:
        predicted, truth = loss.outputs.argmax(1) == 1, loss.targets == 1
        intersection = torch.stack([(~predicted & ~truth).sum(), (predicted & truth).sum()])
        either = torch.stack([(~predicted | ~truth).sum(), (predicted | truth).sum()])
        self.counts = self.counts.to(predicted.device) + torch.stack([intersection, either])

    def compute(self, collective: Collective) -> float:
        intersection, either = collective.sum(self.counts)
        return float((intersection / either).mean())


class PixelClasses(Supervised):
    def weight_per_sample(self, sample: tuple[Tensor, Tensor]) -> float:
        return float(sample[1].numel())

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        loss_sum = functional.cross_entropy(outputs, targets, reduction="sum")
        return Loss(loss_sum=loss_sum, weight=float(targets.numel()), outputs=outputs, targets=targets)

    def metrics(self) -> dict[str, Metric]:
        return {"overlap": Overlap()}
