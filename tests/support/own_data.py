"""Datasets as a user writes them: fields of any names, samples of any size, several splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tests.support.zoo import PAD, Points, Sentences
from trainkit.data.collates import PadSequences


class NamedPoints(Dataset[dict[str, Any]]):
    """The points of the zoo as dicts, read one at a time."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        self._points = Points(split)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a point with fields of uncommon names."""
        inputs, target = self._points[index]
        return {"voxels": inputs, "site": index % 3, "diagnosis": target}


@dataclass
class Scan:
    """A sample as a dataclass."""

    voxels: Tensor
    diagnosis: Tensor


class ScannedPoints(NamedPoints):
    """The same as dataclasses."""

    def __getitem__(self, index: int) -> Any:
        """Return a point."""
        return Scan(*self._points[index])


class PointStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The points in their order, without random access."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        self._points = Points(split)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self._points)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the points."""
        return (self._points[index] for index in range(len(self)))


class SavedPointStream(PointStream):
    """The points, and the number of points that were read."""

    def __init__(self, split: str = "train") -> None:
        super().__init__(split)
        self._place = self._start = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the points, from a place that was loaded on."""
        start, self._start = self._start, 0
        for index in range(start, len(self)):
            self._place = index + 1
            yield self._points[index]

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""
        self._place = self._start = state["place"]


class SplitPoints(Points):
    """Points with several splits of each kind, and one that nothing evaluates."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val", "val_ood", "calibration", "test", "test_new")

    def __init__(self, split: str) -> None:
        super().__init__("train" if split in ("train", "calibration") else "val")
        if split in ("val_ood", "test_new"):
            self.inputs, self.targets = self.inputs[:4], self.targets[:4]


class RaggedSentences(Dataset[tuple[Tensor, Tensor]]):
    """The sentences of the zoo, each cut after its last token that counts."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        self._whole = Sentences(split)

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self._whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the next tokens, each (length,) int64, of another length for another sentence."""
        inputs, targets = self._whole[index]
        length = int((targets != PAD).sum())
        return inputs[:length], targets[:length]


def pad(samples: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Pad to the longest."""
    return PadSequences()(samples)


def hide_words(samples: list[tuple[Tensor, Tensor]], share: float) -> Any:
    """Pad, and set a random share of the tokens to zero; the samples are changed, as some collates do."""
    for index, (inputs, targets) in enumerate(samples):
        hidden = torch.from_numpy(np.random.random(len(inputs)) < share)  # noqa: NPY002 - what a user may draw from
        samples[index] = (inputs.masked_fill(hidden | (torch.rand(len(inputs)) < share), 0), targets)
    return pad(samples)


def drop_one(samples: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Pad all samples but the last."""
    return pad(samples[:-1])


def weights(dataset: Any) -> list[float]:
    """Return the weight of each sample: every third counts twice, and the first not at all."""
    return [0.0, *(2.0 if index % 3 == 0 else 1.0 for index in range(1, len(dataset)))]
