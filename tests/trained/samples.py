"""Datasets to predict on: no targets, or targets that nothing reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.numerics.generators import hash64


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a table without targets: sample i is the same everywhere."""

    num_rows: int = 100
    features: int = 4

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        """Return a row."""
        generator = torch.Generator().manual_seed(hash64(index) & 0x7FFF_FFFF)
        return torch.randn(self.features, generator=generator)

    def gather(self, indices: Tensor) -> Tensor:
        """Return many rows at once: row i holds i, scaled."""
        places = indices.double().unsqueeze(1) * torch.arange(1, self.features + 1).double()
        return torch.sin(places).float()


class Ragged(Rows):
    """Rows of several lengths."""

    gather: Any = None

    def __getitem__(self, index: int) -> Tensor:
        """Return a row of one or two numbers: the length changes after a batch of four."""
        return torch.ones(1 + index // 4 % 2, self.features)
