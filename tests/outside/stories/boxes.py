"""Detection: images of several sizes with another number of boxes each; a function of one's own makes the batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.boxes.Detector, slots: 3}
data: {_target_: stories.boxes.Scenes, collate: stories.boxes.together}
objective: {_target_: stories.boxes.Matched}
"""


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        self.sizes = torch.randint(6, 10, (24, 2)).tolist()
        self.boxes = [torch.rand(int(count), 4) for count in torch.randint(1, 4, (24,))]

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, *self.sizes[index]), self.boxes[index]


def together(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Images padded to 10 x 10, and boxes as a list."""
    images = [functional.pad(image, (0, 10 - image.shape[2], 0, 10 - image.shape[1])) for image, _ in samples]
    return {"images": torch.stack(images), "boxes": [boxes for _, boxes in samples]}


class Detector(nn.Module):
    def __init__(self, slots: int, width: int = 4) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * width, 4 * slots)

    def forward(self, images: Tensor) -> Tensor:
        boxes: Tensor = self.head(self.see(images)).unflatten(1, (-1, 4))
        return boxes


class Matched(Objective):
    """Each true box pulls the nearest predicted one; the boxes are counted, not the images."""

    def weight_per_sample(self, sample: object) -> None:
        """Images have different numbers of boxes."""

    def loss(self, model: Model, batch: dict[str, Any]) -> Loss:
        predicted = model(batch["images"])
        nearest = [
            torch.cdist(true.to(slots.dtype), slots).min(1).values
            for slots, true in zip(predicted, batch["boxes"], strict=True)
        ]
        losses = torch.cat(nearest)
        return Loss(loss_sum=losses.sum(), weight=float(len(losses)))
