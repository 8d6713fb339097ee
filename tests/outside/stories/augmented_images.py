"""Images with augmentation: random flips and noise in the dataset, batch statistics in the model, read by workers."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: classification, _self_]
model: {_target_: stories.augmented_images.SmallNet}
data: {_target_: stories.augmented_images.Stripes, noise: 0.1}
objective: {label_smoothing: 0.1, top_k: [2]}
loader: {num_workers: 1}
"""


class Stripes(Dataset[tuple[Tensor, int]]):
    def __init__(self, split: str, noise: float) -> None:
        self.kinds = torch.randint(3, (24,))
        waves = torch.sin((self.kinds[:, None] + 1) * torch.arange(8.0))
        self.images = waves[:, None, None].expand(24, 1, 8, 8)
        self.noise = noise if split == "train" else 0.0

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.noise:
            image = image.flip(-1) if torch.rand(()) < 0.5 else image
            image = image + self.noise * torch.randn_like(image)
        return image, int(self.kinds[index])


class SmallNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(4 * width, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(images).flatten(1))
        return scores
