"""Images in folders named after their class, the layout of ImageNet."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch import Tensor

from trainkit.data.declaration import Declared, image, label
from trainkit.data.reading.files import existing
from trainkit.data.stored import Normalisation, Samples, Stored
from trainkit.errors import ConfigError, DataError, MissingExtraError, Problem
from trainkit.fields import Limit, above, at_least

SUFFIXES: Final = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_CROP_ATTEMPTS: Final = 10
_LEFT_RIGHT: Final = 0
"""PIL.Image.Transpose.FLIP_LEFT_RIGHT."""
_BILINEAR: Final = 2
"""PIL.Image.Resampling.BILINEAR."""

_Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Files of images, read by Pillow."""

    decode: Any
    """`PIL.Image.open`."""

    @classmethod
    def of(cls, *, image_size: int, resize: int) -> Images:
        """Load Pillow; the arguments are the keys of the dataset.

        Raises:
            ConfigError: the crop is larger than the image.
            MissingExtraError: Pillow is not installed.
        """
        if image_size > resize:
            rule = f"larger than data.resize={resize}, from which it is cropped."
            raise ConfigError([Problem(key="data.image_size", value=image_size, rule=rule)])
        return cls(decode=pillow().open)

    def read(self, file: Path | str, index: int) -> Any:
        """Return the image of a file in RGB.

        Raises:
            DataError: the file is not an image, or is damaged; the message names the sample.
        """
        try:
            with self.decode(file) as opened:
                return opened.convert("RGB")
        except Exception as error:  # a damaged file raises OSError, SyntaxError, ValueError, DecompressionBombError
            raise DataError(f"sample {index} cannot be read: {file}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """`PATH/train/CLASS/image.jpg` and `PATH/val/CLASS/image.jpg`; classes are numbered in sorted order.

    Training images are cropped at random (area and aspect ratio as in Szegedy et al. 2014, arXiv:1409.4842) and
    mirrored with probability one half, each keyed by seed, epoch and sample. For validation, the shorter side is
    resized and the centre is cropped.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Folder to read."""
    path: Path
    """The folder that holds `train` and `val`."""
    image_size: Annotated[int, at_least(1)] = 224
    """Side length in pixels of the model's input."""
    resize: Annotated[int, at_least(1)] = 256
    """Length in pixels of the shorter side before the centre crop, in validation."""
    augment: bool = True
    """Random crops and mirroring in training; false treats both splits the same."""
    min_area: Annotated[float, above(0), Limit(rule="must be at most 1.", high=1)] = 0.08
    """Smallest share of an image's area in a random crop."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Mean per colour channel, subtracted."""
    deviation: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Standard deviation per colour channel, divided by."""
    classes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _files: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)
    _images: Images = field(init=False, repr=False, compare=False)

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return the samples; the length is that of the files."""
        del split
        size = keys.get("image_size", 224)
        return Declared(draw=lambda g: (image(g, 3, size, size), label(g)), stored_bytes=3 * size * size + 4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_images", Images.of(image_size=self.image_size, resize=self.resize))
        root = existing(self.path)
        classes = _classes(existing(root / "train"))
        object.__setattr__(self, "classes", classes)
        folder = existing(root / self.split)
        unknown = sorted(set(_classes(folder)) - set(classes))
        if unknown:
            raise DataError(f"{folder} has classes that train does not have: {', '.join(unknown[:5])}.")
        object.__setattr__(self, "_files", tuple(_listed(folder, classes)))

    def __len__(self) -> int:
        """Return the number of images in this folder."""
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, (3, image_size, image_size) float32, and its class."""
        pixels, label = self._read(index)
        return self._normalisation(pixels.unsqueeze(0))[0], int(label)

    def as_stored(self) -> Stored:
        """Return the images in bytes, cropped and mirrored; they are normalised on the device."""
        normalisation = self._normalisation

        def widened(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return normalisation(batch[0]), batch[1].to(torch.int64)

        return Stored(samples=Samples(len(self), self._read), widened=widened)

    def _read(self, index: int) -> tuple[Tensor, np.int32]:
        """Return an image, (3, image_size, image_size) uint8, and its class."""
        name, label = self._files[index]
        image = self._images.read(name, index)
        random_crop = self.augment and self.split == "train"
        image = self._cropped_at_random(image) if random_crop else centre_crop(image, self.resize, self.image_size)
        return pixels_of(image), np.int32(label)

    @property
    def _normalisation(self) -> Normalisation:
        return Normalisation(tuple(self.mean), tuple(self.deviation))

    @property
    def labels(self) -> list[int]:
        """The class of every image, without opening any."""
        return [label for _, label in self._files]

    def held_out(self) -> ImageFolder:
        """Return the same images without augmentation, for a fold of the training images that is held out."""
        return replace(self, augment=False)

    def _cropped_at_random(self, image: Any) -> Any:
        box = _random_box(image.width, image.height, min_area=self.min_area)
        side = self.image_size
        cropped = image.resize((side, side), _BILINEAR, box=box)
        return cropped.transpose(_LEFT_RIGHT) if random.random() < 0.5 else cropped  # noqa: S311 - keyed by sample


def centre_crop(image: Any, resize: int, side: int) -> Any:
    """Resize the shorter side of an image of Pillow, and cut a square of `side` pixels out of its centre."""
    scale = resize / min(image.width, image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), _BILINEAR)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def pixels_of(image: Any) -> Tensor:
    """Return (3, height, width) uint8 of an RGB image of Pillow."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _random_box(width: int, height: int, *, min_area: float) -> _Box:
    """Return a box of random area and shape inside an image; after ten misses, the largest square in its centre."""
    for _ in range(_CROP_ATTEMPTS):
        area = width * height * random.uniform(min_area, 1)  # noqa: S311 - keyed by sample
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))  # noqa: S311 - see above
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)  # noqa: S311 - see above
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError(key="data", package="pillow", extra="images") from error


def _classes(folder: Path) -> tuple[str, ...]:
    found = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    if not found:
        raise DataError(f"{folder} holds no class folders: images are expected as {folder / 'CLASS' / 'image.jpg'}.")
    return found


def _listed(folder: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    # use plain strings: a million Path objects take half a gigabyte
    return [
        (str(file), label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
