"""CIFAR-10: 60,000 colour images of animals and vehicles, 32 x 32, in ten classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch

from trainkit.data.declaration import Declared, image, label
from trainkit.data.reading.files import existing
from trainkit.data.stored import ImagesInMemory, Normalisation
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import a_folder, below, placement

_TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_RECORD: Final = 1 + 3 * 32 * 32
"""Bytes of an image in a file: its class, then the red, green and blue pixels, row by row."""
_RECORDS: Final = 10_000
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Means and standard deviations of the colours over the 50,000 training images, scaled to 0 to 1."""
_REMEDY: Final = (
    "Unpack cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html) and give the folder of its "
    ".bin files as data.path."
)


@dataclass(frozen=True, kw_only=True)
class Cifar10(ImagesInMemory):
    """CIFAR-10 from the six files of its binary version (Krizhevsky 2009, "Learning multiple layers of features").

    The last `val_size` of the 50,000 training images are held out to validate; the 10,000 test images are the test
    split. A sample is an image, (3, 32, 32) float32, and its class, () int64.
    """

    split: Literal["train", "val", "test"]
    """Part of the dataset to use."""
    path: Annotated[Path | None, placement, a_folder] = None
    """Folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    val_size: Annotated[int, below(0, 50_000)] = 5000
    """Training images held out; with 0, train on all and do not validate."""
    scaling: Literal["unit", "standard"] = "standard"
    """`unit`: pixels from 0 to 1; `standard`: each colour with mean 0 and deviation 1 over the training images."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if images are held out for it."""
        return ("train", "test") if node.get("val_size") == 0 else ("train", "val", "test")

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        held_out = int(keys.get("val_size", 5000))
        counts = {"train": 50_000 - held_out, "val": held_out, "test": 10_000}
        return Declared(
            num_samples=counts[split], draw=lambda g: (image(g, 3, 32, 32), label(g, 10)), stored_bytes=_RECORD
        )

    def __post_init__(self) -> None:
        if self.path is None:
            raise ConfigError([Problem(key="data.path", rule=f"is not set. {_REMEDY}")])
        folder = existing(self.path, a_folder, remedy=_REMEDY)
        names = ("test_batch.bin",) if self.split == "test" else _TRAIN
        records = np.concatenate([_records(folder / name) for name in names])
        border = len(records) - self.val_size
        part = {"train": slice(0, border), "val": slice(border, None), "test": slice(None)}[self.split]
        images, classes = (torch.from_numpy(records[part, columns].copy()) for columns in (slice(1, None), 0))
        scaling = Normalisation(_MEAN, _DEVIATION) if self.scaling == "standard" else Normalisation()
        self._keep_images(images.view(-1, 3, 32, 32), classes, scaling)


def _records(path: Path) -> Any:
    """Return (10,000, 3,073) uint8: the class of each image, and its pixels.

    Raises:
        DataError: the file is missing, has another size, or holds a class above 9.
    """
    size = existing(path, remedy=_REMEDY).stat().st_size
    if size != _RECORDS * _RECORD:
        raise DataError(f"{path} has {size:,} bytes, and a file of CIFAR-10 has {_RECORDS * _RECORD:,}. {_REMEDY}")
    records = np.fromfile(path, dtype=np.uint8).reshape(_RECORDS, _RECORD)
    if (highest := int(records[:, 0].max())) > 9:
        raise DataError(f"{path} is not a file of CIFAR-10: an image has the class {highest}. {_REMEDY}")
    return records
