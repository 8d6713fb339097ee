"""Bags of words and a lookup table: a model with sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bags:
    """Samples of `length` words out of `vocab_size`, in ten classes; the higher `power`, the fewer are frequent."""

    splits = ("train",)

    def __init__(
        self, *, split: str = "train", vocab_size: int, length: int, num_samples: int = 2048, power: float = 3.0
    ) -> None:
        del split
        generator = torch.Generator().manual_seed(0)
        even = torch.rand(num_samples, length, generator=generator)
        self._words = (even**power * vocab_size).long()
        self._classes = torch.arange(num_samples) % 10

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._words[index], self._classes[index]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all samples."""
        return self._words, self._classes


class Lookup(nn.Module):
    """The mean of its words' vectors, and a linear layer."""

    def __init__(self, *, vocab_size: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width, sparse=sparse)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (samples, length) int64 to (samples, 10)."""
        scores: Tensor = self.head(self.embed(tokens).mean(1))
        return scores
