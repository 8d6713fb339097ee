"""A small convolutional network for small images."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, below, unit


class ConvNet(nn.Module):
    """Blocks of convolution, pooling, batch norm and ReLU, each halving the image; then a linear layer.

    Example:
        >>> model = ConvNet(in_channels=1, image_size=28, widths=[8, 16], num_classes=10)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    draws_nothing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        in_channels: Annotated[int, at_least(1), unit("channels")] = 1,
        image_size: Annotated[int, at_least(1), unit("pixels")] = 28,
        widths: Annotated[list[int], unit("channels")],
        num_classes: Annotated[int, at_least(1), unit("classes")] = 10,
        dropout: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.0,
    ) -> None:
        """Build the blocks.

        Args:
            in_channels: 1 for grey images, 3 for colour.
            image_size: pixels per side.
            widths: channels of each block.
            num_classes: number of outputs per sample.
            dropout: fraction of the last features zeroed in training, in [0, 1).
        """
        super().__init__()
        if not widths or min(widths) < 1:
            raise ConfigError([Problem(key="model.widths", value=widths, rule="needs one width or more, each >= 1.")])
        last_size = image_size >> len(widths)
        if not last_size:
            halved = f"halves images of model.image_size={image_size} {len(widths)} times"
            rule = f"{halved}, to less than a pixel. Use fewer widths."
            raise ConfigError([Problem(key="model.widths", value=widths, rule=rule)])
        self.blocks = nn.ModuleList(_Block(fan_in, fan_out) for fan_in, fan_out in pairwise([in_channels, *widths]))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(widths[-1] * last_size**2, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map (samples, in_channels, height, width) to (samples, num_classes)."""
        features = images
        for block in self.blocks:
            features = block(features)
        scores: Tensor = self.head(features)
        return scores


class _Block(nn.Module):
    draws_nothing: ClassVar[bool] = True

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.BatchNorm2d(fan_out)

    def forward(self, features: Tensor) -> Tensor:
        # channels_last makes a step on the CPU up to a fifth faster, and pooling before the norm another tenth: the
        # norm then processes a quarter of the pixels.
        features = self.conv(features.contiguous(memory_format=torch.channels_last))
        pooled: Tensor = self.norm(self.pool(features)).relu()
        return pooled
