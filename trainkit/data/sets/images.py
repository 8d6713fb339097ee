"""Datasets of images: the embedded digits, published files, and folders of image files."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.data.declaration import Declared, image, label
from trainkit.data.reading.files import alike, existing, fetch
from trainkit.data.stored import InMemory, Normalisation, Samples, Stored
from trainkit.errors import ConfigError, DataError, Problem, listed
from trainkit.fields import Limit, Reads, a_folder, above, at_least, below, maths, placement, unit
from trainkit.files import cache_folder


@dataclass(frozen=True, kw_only=True)
class Digits(InMemory):
    """The UCI digits that ship with trainkit (see digits.LICENSE), 1,437 to train on and 360 to validate on.

    The split is stored with the data: stratified by class, drawn once, the same for all users. A sample is an image,
    (1, 8, 8) float32, and its class, () int64.

    Example:
        >>> digits = Digits(split="val")
        >>> len(digits), digits[0][0].shape
        (360, torch.Size([1, 8, 8]))
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Part of the dataset to use."""
    scaling: Literal["unit", "standard"] = "unit"
    """`unit`: pixels from 0 to 1; `standard`: mean 0 and deviation 1 over all pixels of the training part."""

    @classmethod
    def declare(cls, _keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        return Declared(num_samples=1437 if split == "train" else 360, draw=lambda g: (image(g, 1, 8, 8), label(g, 10)))

    def __post_init__(self) -> None:
        with files("trainkit.data").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
            pixels, labels, val = stored["pixels"], stored["labels"], stored["val"]
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[val] = True
        scaled = (pixels / 16).astype(np.float32)
        if self.scaling == "standard":
            scaled = (scaled - scaled[~held_out].mean()) / scaled[~held_out].std()
        chosen = held_out if self.split == "val" else ~held_out
        self._keep(torch.from_numpy(scaled[chosen]).unsqueeze(1), torch.from_numpy(labels[chosen].astype(np.int64)))


@dataclass(frozen=True, kw_only=True)
class _HeldOut(InMemory):
    """Images in ten classes, kept in bytes, with 10,000 test images; the last training images validate.

    A sample is an image, (channels, height, width) float32, and its class, () int64.
    """

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
        self._keep(images, torch.from_numpy(classes[part].copy()))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a sample: an image, float32, and its class, () int64."""
        images, classes = self._widened(tuple(array[index].unsqueeze(0) for array in self._arrays))
        return images[0], classes[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all images, float32, and their classes, int64."""
        return self._widened(self._arrays)

    @property
    def labels(self) -> Tensor:
        """The class of every image, (samples,) int64."""
        return self._arrays[1].to(torch.int64)

    def as_stored(self) -> Stored:
        """Return images and classes in bytes."""
        samples = Samples(len(self), super().__getitem__, tensors=lambda: self._arrays)
        return Stored(samples=samples, widened=self._widened)

    def _widened(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        scaling = self._standard if self.scaling == "standard" else Normalisation()
        return scaling(batch[0]), batch[1].to(torch.int64)


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
    val_size: Annotated[int, below(0, 50_000), unit("samples")] = 5000
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
    val_size: Annotated[int, below(0, 60_000), unit("samples")] = 5000
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
    value = hashlib.sha256(content).hexdigest()
    if value != _SHA256[name]:
        raise DataError(f"{path} is not the expected file: unpacked, its SHA-256 is {value}, expected {_SHA256[name]}.")
    return content


SUFFIXES: Final = frozenset({
    ".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff",
    ".webp",
})  # fmt: skip
_CROP_ATTEMPTS: Final = 10
_LEFT_RIGHT: Final = 0
"""PIL.Image.Transpose.FLIP_LEFT_RIGHT."""
_BILINEAR: Final = 2
"""PIL.Image.Resampling.BILINEAR."""
_ORIENTATION: Final = 0x0112
"""Number of the EXIF tag of the orientation; 1 is upright."""
_LOOKED_AT: Final = 2000
"""Files whose heads are read before a run."""

_Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class _Images:
    """The common part of these datasets: files of images, read by Pillow, in bytes until they are normalised."""

    image_size: Annotated[int, at_least(1), unit("pixels")] = 224
    """Side length in pixels of the model's input."""
    resize: Annotated[int, at_least(1), unit("pixels")] = 256
    """Length in pixels of the shorter side before the centre crop."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Mean per colour channel, subtracted."""
    deviation: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Standard deviation per colour channel, divided by."""
    exif: Annotated[Literal["apply", "ignore"], maths(neutral="apply")] = "apply"
    """Turn each image as its EXIF orientation says, or read it as it is stored."""
    _files: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _where: str = field(init=False, repr=False, compare=False)
    """The name of the split in notes."""
    _left_out: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.image_size > self.resize:
            rule = f"larger than data.resize={self.resize}, from which it is cropped."
            raise ConfigError([Problem(key="data.image_size", value=self.image_size, rule=rule)])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._files)

    @property
    def _normalisation(self) -> Normalisation:
        return Normalisation(tuple(self.mean), tuple(self.deviation))

    def _pixels(self, index: int, *, at_random: float | None = None) -> Tensor:
        """Return an image, (3, image_size, image_size) uint8: its centre, or with `at_random`, a part of at least this
        share of its area, of which every other one is mirrored.

        An image is the first frame of a file in RGB, without transparency; of 16 bits of a pixel, the higher 8.

        Raises:
            DataError: the file is not an image, is damaged, or has numbers without a range; the message names the
                sample.
        """
        from PIL import Image, ImageOps  # noqa: PLC0415 - for datasets of files alone

        file, side = self._files[index], self.image_size
        try:
            with Image.open(file) as opened:
                deep, image = _is_deep(opened), opened
                if self.exif == "apply" and opened.getexif().get(_ORIENTATION, 1) > 1:
                    image = ImageOps.exif_transpose(opened)
                if deep:  # Pillow would set every pixel above 255 to white
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                image = image.convert("RGB")
        except Exception as error:  # a damaged file raises OSError, SyntaxError, ValueError, DecompressionBombError
            raise DataError(f"sample {index} cannot be read: {file}: {error}") from error
        if at_random is None:
            scale = self.resize / min(image.width, image.height)
            image = image.resize((round(image.width * scale), round(image.height * scale)), _BILINEAR)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        else:
            box = _random_box(image.width, image.height, min_area=at_random)
            image = image.resize((side, side), _BILINEAR, box=box)
            if random.random() < 0.5:  # noqa: S311 - keyed by sample
                image = image.transpose(_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about files that are left out, and about images that are not read as they are stored; opens the heads
        of at most 2,000 files.

        Raises:
            DataError: some cannot be read.
        """
        from PIL import Image  # noqa: PLC0415 - as above

        files = self._files
        wrong, counts, shown = list[str](), Counter[int](), files[:: -(-len(files) // _LOOKED_AT) or 1]
        for file in shown:
            try:
                with Image.open(file) as opened:
                    # PngImageFile.getexif reads all pixels first
                    turned = Image.Image.getexif(opened).get(_ORIENTATION, 1) > 1
                    clear = opened.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in opened.info
                    kinds = (_is_deep(opened), turned, clear, getattr(opened, "is_animated", False))
                    counts.update(index for index, holds in enumerate(kinds) if holds)
            except Exception as error:  # noqa: BLE001 - as in `_pixels`
                wrong.append(f"{file}: {error}")
        if wrong:
            raise DataError(f"{len(wrong)} of {len(shown)} images cannot be read: {listed(wrong, 3)}")
        scope = f"of {len(files)} images" if shown == files else f"of {len(shown)} images that were looked at"
        upright = "are turned upright" if self.exif == "apply" else "are not turned upright"
        texts = (
            "have 16 bits per pixel, of which the higher 8 are read",
            f"{upright} (data.exif={self.exif}): their EXIF orientation says how",
            "are partly transparent, which is left out",
            "have several frames or pages, of which the first is read",
        )
        remarks = [f"{counts[index]} {scope} {text}" for index, text in enumerate(texts) if counts[index]]
        return tuple(f"{self._where}: {note}" for note in (*self._left_out, *remarks))


@dataclass(frozen=True, kw_only=True)
class ImageFiles(_Images):
    """All images below a folder, in the order of their paths, prepared like validation images of `image_folder`.

    The id of an image is its path below the folder.
    """

    splits: ClassVar[tuple[str, ...]] = ("all",)

    path: Annotated[Path, placement, a_folder]
    """The folder."""
    ids: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        root = existing(self.path, a_folder)
        files, left_out = images_below(root)
        ids = tuple(sorted(Path(file).relative_to(root).as_posix() for file in files))
        vars(self).update(ids=ids, _files=tuple(str(root / name) for name in ids))
        vars(self).update(_where=self.path.name, _left_out=tuple(note_of_left_out(left_out)))

    def __getitem__(self, index: int) -> Tensor:
        """Return an image, (3, image_size, image_size) float32."""
        return self._normalisation(self._pixels(index).unsqueeze(0))[0]

    def as_stored(self) -> Stored:
        """Return the images in bytes; they are normalised on the device."""
        return Stored(samples=Samples(len(self), self._pixels), widened=self._normalisation)


@dataclass(frozen=True, kw_only=True)
class ImageFolder(_Images):
    """`PATH/train/CLASS/image.jpg` and `PATH/val/CLASS/image.jpg`; classes are numbered in sorted order.

    Images in folders below CLASS belong to it; hidden folders and files are left out.

    Training images are cropped at random (area and aspect ratio as in Szegedy et al. 2014, arXiv:1409.4842) and
    mirrored with probability one half, each keyed by seed, epoch and sample. For validation, the shorter side is
    resized and the centre is cropped.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Folder to read."""
    path: Annotated[Path, a_folder]
    """The folder that holds `train` and `val`."""
    augment: bool = True
    """Random crops and mirroring in training; false treats both splits the same."""
    min_area: Annotated[float, above(0), Limit(rule="must be at most 1.", high=1), unit("a share, 0 to 1")] = 0.08
    """Smallest share of an image's area in a random crop."""
    classes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    labels: list[int] = field(init=False, repr=False, compare=False)
    """The class of every image, without opening any."""

    @classmethod
    def declare(cls, keys: Mapping[str, Any], _split: str) -> Declared:
        """Return the samples; the length is that of the files."""
        size = keys.get("image_size", 224)
        return Declared(draw=lambda g: (image(g, 3, size, size), label(g)), stored_bytes=3 * size * size + 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        root = existing(self.path, a_folder)
        classes = _classes(existing(root / "train", a_folder))
        folder = existing(root / self.split, a_folder)
        unknown = sorted(set(_classes(folder)) - set(classes))
        if unknown:
            raise DataError(f"{folder} has classes that train does not have: {listed(map(repr, unknown))}.")
        files, labels, empty, left_out = list[str](), list[int](), list[str](), Counter[str]()
        for number, name in enumerate(classes):
            images, others = images_below(folder / name) if (folder / name).is_dir() else ([], Counter[str]())
            files += images
            labels += [number] * len(images)
            left_out += others
            empty += [] if images else [name]
        strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in classes)
        notes = [f"left out beside the class folders: {listed(strays)}"] if strays else []
        notes += note_of_left_out(left_out)
        notes += [f"classes differ in case or blanks only: {listed(map(repr, same))}" for same in alike(classes)]
        notes += [f"there is no image of the classes {listed(map(repr, empty))}"] if empty else []
        vars(self).update(classes=classes, labels=labels, _files=tuple(files))
        vars(self).update(_where=f"{self.path.name}/{self.split}", _left_out=tuple(notes))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, (3, image_size, image_size) float32, and its class."""
        pixels, label = self._read(index)
        return self._normalisation(pixels.unsqueeze(0))[0], int(label)

    def as_stored(self) -> Stored:
        """Return the images in bytes, cropped and mirrored; they are normalised on the device."""
        normalisation = self._normalisation
        return Stored(
            samples=Samples(len(self), self._read),
            widened=lambda batch: (normalisation(batch[0]), batch[1].to(torch.int64)),
        )

    def _read(self, index: int) -> tuple[Tensor, np.int32]:
        """Return an image, (3, image_size, image_size) uint8, and its class."""
        at_random = self.min_area if self.augment and self.split == "train" else None
        return self._pixels(index, at_random=at_random), np.int32(self.labels[index])

    def held_out(self) -> ImageFolder:
        """Return the same images without augmentation, for a fold of the training images that is held out."""
        return replace(self, augment=False)


def _is_deep(opened: Any) -> bool:
    """Return whether an opened image has 16 bits per pixel.

    Raises:
        ValueError: its numbers have no range.
    """
    # Pillow opens 16-bit files as I;16, some formats as I with the range of 16 bits
    if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
        return True
    if opened.mode in ("I", "F"):
        rule = f"its pixels are 32-bit numbers without a range (mode {opened.mode}). Convert it to 8 or 16 bits"
        raise ValueError(rule)
    return False


def images_below(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return the images in a folder and the folders below it, sorted by folder and name, and the files left out.

    Files without a suffix of images are left out, and files whose own name or folder is hidden (it begins with a dot).

    Returns:
        The paths, and the number of files left out by suffix.

    Raises:
        DataError: a folder cannot be read, or is a link to a folder above.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    files, left_out, walked = list[str](), Counter[str](), []
    for inner, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        for link in filter(os.path.islink, (os.path.join(inner, name) for name in folders)):  # noqa: PTH118
            if f"{os.path.realpath(inner)}/".startswith(f"{os.path.realpath(link)}/"):
                raise DataError(f"{link} is a link to a folder above, whose images would be read again. Remove it.")
        walked.append((inner, names))
    for inner, names in sorted(walked):
        is_hidden = any(part.startswith(".") for part in Path(inner).relative_to(folder).parts)
        for name in sorted(names):
            suffix = Path(name).suffix.lower()
            if is_hidden or name.startswith("."):
                left_out["hidden"] += 1
            elif suffix in SUFFIXES:
                files.append(os.path.join(inner, name))  # noqa: PTH118 - a million Path objects take half a gigabyte
            else:
                left_out[suffix or "without suffix"] += 1
    return files, left_out


def note_of_left_out(left_out: Mapping[str, int]) -> list[str]:
    """Return the note about files that are no images."""
    kinds = listed(f"{kind}: {count}" for kind, count in sorted(left_out.items()))
    return [f"{sum(left_out.values())} files are left out ({kinds})"] if left_out else []


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


def _classes(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder} holds no class folders: images are expected as {folder / 'CLASS' / 'image.jpg'}.")
    return tuple(names)
