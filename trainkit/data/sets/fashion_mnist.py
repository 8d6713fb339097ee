"""Fashion-MNIST: 70,000 grey images of clothes, 28 x 28, in ten classes."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.declaration import Declared, image, label
from trainkit.data.reading.files import existing, fetch
from trainkit.data.stored import ImagesInMemory, Normalisation
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import Reads, a_folder, below, placement
from trainkit.files import cache_folder

_URL: Final = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_DEBIAN: Final = Path("/usr/share/datasets/fashion-mnist")
# Digests of the unpacked files: the same content is distributed in differently packed files.
_SHA256: Final = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_MEAN, _DEVIATION = 0.2860, 0.3530
"""Mean and standard deviation over all pixels of the 60,000 training images, scaled to 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class FashionMnist(ImagesInMemory):
    """Fashion-MNIST from its four idx.gz files (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747).

    The last `val_size` of the 60,000 training images are held out to validate; the 10,000 test images are the test
    split. A sample is an image, (1, 28, 28) float32, and its class, () int64.
    """

    split: Literal["train", "val", "test"]
    """Part of the dataset to use."""
    path: Annotated[Path | None, placement, Reads(kind="folder", unless="download")] = None
    """Folder with the four files; null: the Debian package dataset-fashion-mnist, else the download cache."""
    download: Annotated[bool, placement] = False
    """Download the files (31 MB) into `path`, or the cache folder, if they are missing; false downloads nothing."""
    val_size: Annotated[int, below(0, 60_000)] = 5000
    """Training images held out; with 0, train on all and do not validate."""
    scaling: Literal["unit", "standard"] = "standard"
    """`unit`: pixels from 0 to 1; `standard`: mean 0 and deviation 1 over the training images."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if images are held out for it."""
        return ("train", "test") if node.get("val_size") == 0 else ("train", "val", "test")

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        held_out = int(keys.get("val_size", 5000))
        counts = {"train": 60_000 - held_out, "val": held_out, "test": 10_000}
        return Declared(
            num_samples=counts[split], draw=lambda g: (image(g, 1, 28, 28), label(g, 10)), stored_bytes=28 * 28 + 1
        )

    def __post_init__(self) -> None:
        folder = self._folder()
        stem = "t10k" if self.split == "test" else "train"
        pixels = _read(folder, f"{stem}-images-idx3-ubyte", header=16, download=self.download)
        labels = _read(folder, f"{stem}-labels-idx1-ubyte", header=8, download=self.download)
        border = 60_000 - self.val_size
        part = {"train": slice(0, border), "val": slice(border, None), "test": slice(None)}[self.split]
        images = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)[part].copy())
        standard = Normalisation((_MEAN,), (_DEVIATION,))
        scaling = standard if self.scaling == "standard" else Normalisation()
        self._keep_images(images, torch.from_numpy(labels[part].copy()), scaling)

    def _folder(self) -> Path:
        if self.path is not None:
            return self.path.expanduser() if self.download else existing(self.path, a_folder)
        if _DEBIAN.is_dir() and not self.download:
            return _DEBIAN
        cached = cache_folder() / "fashion_mnist"
        if not self.download and not cached.is_dir():
            rule = (
                "is not set, and Fashion-MNIST is not on this machine. Install the Debian package "
                "dataset-fashion-mnist, give the folder of its four idx.gz files, or use data.download=true."
            )
            raise ConfigError([Problem(key="data.path", rule=rule)])
        return cached


def _read(folder: Path, name: str, *, header: int, download: bool) -> NDArray[np.uint8]:
    """Return the data of an idx file, checked against its digest."""
    packed = folder / f"{name}.gz"
    if download and not packed.exists():
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
