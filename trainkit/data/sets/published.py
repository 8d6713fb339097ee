"""CIFAR-10 and Fashion-MNIST: small images in ten classes, kept in memory."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.declaration import Declared, image, label
from trainkit.data.reading.files import existing, fetch
from trainkit.data.stored import ImagesInMemory, Normalisation
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import Reads, a_folder, below, placement
from trainkit.files import cache_folder


@dataclass(frozen=True, kw_only=True)
class _HeldOut(ImagesInMemory):
    """Images in ten classes with 10,000 test images; the last training images are held out to validate."""

    _count: ClassVar[int]
    """Number of images to train and validate on."""
    _shape: ClassVar[tuple[int, int, int]]
    _standard: ClassVar[Normalisation]
    """Means and standard deviations over all training images, scaled to 0 to 1."""

    split: Literal["train", "val", "test"]
    """Part of the dataset to use."""
    val_size: int = 5000
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
        counts = {"train": cls._count - held_out, "val": held_out, "test": 10_000}
        return Declared(
            num_samples=counts[split],
            draw=lambda g: (image(g, *cls._shape), label(g, 10)),
            stored_bytes=math.prod(cls._shape) + 1,
        )

    def _keep_split(self, pixels: NDArray[np.uint8], classes: NDArray[np.uint8]) -> None:
        """Keep the images of the split, of all that its files hold."""
        border = len(classes) - self.val_size
        part = {"train": slice(0, border), "val": slice(border, None), "test": slice(None)}[self.split]
        images = torch.from_numpy(pixels[part].copy()).view(-1, *self._shape)
        scaling = self._standard if self.scaling == "standard" else Normalisation()
        self._keep_images(images, torch.from_numpy(classes[part].copy()), scaling)


_TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_RECORD: Final = 1 + 3 * 32 * 32
"""Bytes of an image in a file: its class, then the red, green and blue pixels, row by row."""
_RECORDS: Final = 10_000
_REMEDY: Final = (
    "Unpack cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html) and give the folder of its "
    ".bin files as data.path."
)


@dataclass(frozen=True, kw_only=True)
class Cifar10(_HeldOut):
    """CIFAR-10 from the six files of its binary version (Krizhevsky 2009, "Learning multiple layers of features").

    The last `val_size` of the 50,000 training images are held out to validate; the 10,000 test images are the test
    split. A sample is an image, (3, 32, 32) float32, and its class, () int64.
    """

    _count: ClassVar[int] = 50_000
    _shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    _standard: ClassVar[Normalisation] = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

    path: Annotated[Path | None, placement, a_folder] = None
    """Folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    val_size: Annotated[int, below(0, 50_000)] = 5000
    """Training images held out; with 0, train on all and do not validate."""

    def __post_init__(self) -> None:
        if self.path is None:
            raise ConfigError([Problem(key="data.path", rule=f"is not set. {_REMEDY}")])
        folder = existing(self.path, a_folder, remedy=_REMEDY)
        names = ("test_batch.bin",) if self.split == "test" else _TRAIN
        records = np.concatenate([_records(folder / name) for name in names])
        self._keep_split(records[:, 1:], records[:, 0])


def _records(path: Path) -> NDArray[np.uint8]:
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


_URL: Final = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_DEBIAN: Final = Path("/usr/share/datasets/fashion-mnist")
# Digests of the unpacked files: the same content is distributed in differently packed files.
_SHA256: Final = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


@dataclass(frozen=True, kw_only=True)
class FashionMnist(_HeldOut):
    """Fashion-MNIST from its four idx.gz files (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747).

    The last `val_size` of the 60,000 training images are held out to validate; the 10,000 test images are the test
    split. A sample is an image, (1, 28, 28) float32, and its class, () int64.
    """

    _count: ClassVar[int] = 60_000
    _shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    _standard: ClassVar[Normalisation] = Normalisation((0.2860,), (0.3530,))

    path: Annotated[Path | None, placement, Reads(kind="folder", unless="download")] = None
    """Folder with the four files; null: the Debian package dataset-fashion-mnist, else the download cache."""
    download: Annotated[bool, placement] = False
    """Download the files (31 MB) into `path`, or the cache folder, if they are missing; false downloads nothing."""
    val_size: Annotated[int, below(0, 60_000)] = 5000
    """Training images held out; with 0, train on all and do not validate."""

    def __post_init__(self) -> None:
        cached = cache_folder() / "fashion_mnist"
        if self.path is not None:
            folder = self.path.expanduser() if self.download else existing(self.path, a_folder)
        elif _DEBIAN.is_dir() and not self.download:
            folder = _DEBIAN
        elif self.download or cached.is_dir():
            folder = cached
        else:
            rule = (
                "is not set, and Fashion-MNIST is not on this machine. Install the Debian package "
                "dataset-fashion-mnist, give the folder of its four idx.gz files, or use data.download=true."
            )
            raise ConfigError([Problem(key="data.path", rule=rule)])
        stem = "t10k" if self.split == "test" else "train"
        pixels = self._read(folder, f"{stem}-images-idx3-ubyte", header=16)
        self._keep_split(pixels.reshape(-1, 28 * 28), self._read(folder, f"{stem}-labels-idx1-ubyte", header=8))

    def _read(self, folder: Path, name: str, *, header: int) -> NDArray[np.uint8]:
        """Return the data of an idx file, checked against its digest."""
        packed = folder / f"{name}.gz"
        if self.download and not packed.exists():
            fetch(_URL + packed.name, packed, accept=lambda path: _unpacked(path, name))
        return np.frombuffer(_unpacked(existing(packed), name), dtype=np.uint8, offset=header)


def _unpacked(path: Path, name: str) -> bytes:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256[name]:
        raise DataError(f"{path} is not the expected file: unpacked, its SHA-256 is {found}, expected {_SHA256[name]}.")
    return content
