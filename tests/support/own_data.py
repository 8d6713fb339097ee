"""Datasets as a user writes them: fields of any names, samples of any size, several splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tests.support.zoo import Points

__all__ = ["NamedPoints", "PointStream", "Scan", "ScannedPoints"]


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
