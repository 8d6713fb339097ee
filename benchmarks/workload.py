"""W1, the workload that shows a framework's own overhead: digits, MLP 64-128-10, batch 64, AdamW, one thread."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainkit.data.sets.images import Digits

BATCH = 64
LR = 1e-3


def arrays() -> tuple[Tensor, Tensor]:
    """Return the training split: (1437, 64) float32 and (1437,) int64."""
    images, labels = Digits(split="train").tensors()
    return images.flatten(1).contiguous(), labels


class MapStyle(Dataset[tuple[Tensor, Tensor]]):
    """The same digits as a user's own map-style dataset, one sample at a time."""

    splits = ("train",)

    def __init__(self, split: str = "train") -> None:
        del split
        self._images, self._labels = arrays()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._labels[index]


def model() -> nn.Module:
    """Return the model, with 9,610 parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return the loader of a hand-written loop."""
    return DataLoader(TensorDataset(*arrays()), batch_size=BATCH, shuffle=True)


def steps(epochs: int) -> int:
    """Return the updates of a number of epochs; the last, short batch counts."""
    return epochs * -(-len(arrays()[1]) // BATCH)
