"""Residual networks for images (He et al. 2015, arXiv:1512.03385)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from trainkit.fields import at_least, unit

_BLOCKS: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_WIDTHS: Final = (64, 128, 256, 512)


class ResNet(nn.Module):
    """ResNet with the stride of a bottleneck in its 3 x 3 convolution (ResNet v1.5).

    Example:
        >>> sum(p.numel() for p in ResNet(depth=18).parameters())
        11689512
    """

    draws_nothing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        depth: Literal[18, 34, 50, 101] = 50,
        num_classes: Annotated[int, at_least(1), unit("classes")] = 1000,
        in_channels: Annotated[int, at_least(1), unit("channels")] = 3,
        zero_init_last_gamma: bool = True,
    ) -> None:
        """Build the stages.

        Args:
            depth: number of layers with weights.
            num_classes: number of outputs per sample.
            in_channels: channels of the images.
            zero_init_last_gamma: start each residual branch at zero (Goyal et al. 2017, section 5.1).
        """
        super().__init__()
        bottleneck = depth >= 50
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        expansion = 4 if bottleneck else 1
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (width, count) in enumerate(zip(_WIDTHS, _BLOCKS[depth], strict=True)):
            for position in range(count):
                stride = 2 if stage and not position else 1
                block = _Residual(channels, width, width * expansion, stride=stride, bottleneck=bottleneck)
                if zero_init_last_gamma:
                    nn.init.zeros_(block.branch[-1].weight)  # type: ignore[arg-type]
                blocks.append(block)
                channels = width * expansion
        self.blocks = nn.Sequential(*blocks)
        final = nn.Linear(channels, num_classes)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), final)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(final.weight, std=0.01)
        nn.init.zeros_(final.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map (samples, in_channels, height, width) to (samples, num_classes)."""
        images = images.contiguous(memory_format=torch.channels_last)
        scores: Tensor = self.head(self.blocks(self.stem(images)))
        return scores


class _Residual(nn.Module):
    """Convolutions with a shortcut: two of 3 x 3, or 1 x 1, 3 x 3, 1 x 1."""

    draws_nothing: ClassVar[bool] = True

    def __init__(self, channels: int, width: int, out_channels: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        ends = 1 if bottleneck else 3
        kernels = [(channels, width, ends, 1 if bottleneck else stride), (width, out_channels, ends, 1)]
        if bottleneck:
            kernels.insert(1, (width, width, 3, stride))
        layers: list[nn.Module] = []
        for fan_in, fan_out, size, step in kernels:
            convolution = nn.Conv2d(fan_in, fan_out, size, stride=step, padding=size // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True)]
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels))
            if stride > 1 or channels != out_channels
            else nn.Identity()
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(self.branch(features) + self.shortcut(features))
