"""A stream: samples come from a generator, one after the other, and are never all there at once."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

RECIPE = """
defaults: [override /model: null, override /data: stream, override /optimizer: sgd,
  override /objective: classification, _self_]
model: {_target_: stories.stream.Parity}
data:
  source: {_target_: stories.stream.Numbers, start: 0}
  num_samples: 24
  val_source: {_target_: stories.stream.Numbers, start: 64}
  val_num_samples: 12
loader: {shuffle: false}
"""


class Numbers(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(self.start, self.start + 24):
            bits = torch.tensor([float(number >> bit & 1) for bit in range(7)])
            yield bits + 0.05 * torch.randn(7), int(bits.sum()) % 2


class Parity(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, bits: Tensor) -> Tensor:
        scores: Tensor = self.layers(bits)
        return scores
