"""Samples without targets, to predict on: images below a folder, lines of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from trainkit.data.reading.files import existing, text_of
from trainkit.data.sets.image_folder import Images, centre_crop, images_below, note_of_left_out, pixels_of
from trainkit.data.stored import Normalisation, Samples, Stored
from trainkit.errors import DataError
from trainkit.fields import a_file, a_folder, at_least, maths, placement


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """All images below a folder, in the order of their paths, prepared like validation images of `image_folder`.

    The id of an image is its path below the folder.
    """

    splits: ClassVar[tuple[str, ...]] = ("all",)

    path: Annotated[Path, placement, a_folder]
    """The folder."""
    image_size: Annotated[int, at_least(1)] = 224
    """Side length in pixels of the model's input."""
    resize: Annotated[int, at_least(1)] = 256
    """Length in pixels of the shorter side before the centre crop."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Mean per colour channel, subtracted."""
    deviation: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Standard deviation per colour channel, divided by."""
    exif: Annotated[Literal["apply", "ignore"], maths(neutral="apply")] = "apply"
    """Turn each image as its EXIF orientation says, or read it as it is stored."""
    ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _images: Images = field(init=False, repr=False, compare=False)
    _left_out: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        images = Images.of(image_size=self.image_size, resize=self.resize, exif=self.exif)
        object.__setattr__(self, "_images", images)
        root = existing(self.path, a_folder)
        files, left_out = images_below(root)
        object.__setattr__(self, "ids", tuple(sorted(Path(file).relative_to(root).as_posix() for file in files)))
        object.__setattr__(self, "_left_out", tuple(note_of_left_out(left_out)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about files that are left out, and about images that are not read as they are stored."""
        of_images = self._images.notes([str(self.path.expanduser() / name) for name in self.ids])
        return tuple(f"{self.path.name}: {note}" for note in (*self._left_out, *of_images))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        """Return an image, (3, image_size, image_size) float32."""
        return self._normalisation(self._read(index).unsqueeze(0))[0]

    def as_stored(self) -> Stored:
        """Return the images in bytes; they are normalised on the device."""
        return Stored(samples=Samples(len(self), self._read), widened=self._normalisation)

    def _read(self, index: int) -> Tensor:
        """Return an image, (3, image_size, image_size) uint8."""
        image = self._images.read(self.path.expanduser() / self.ids[index], index)
        return pixels_of(centre_crop(image, self.resize, self.image_size))

    @property
    def _normalisation(self) -> Normalisation:
        return Normalisation(tuple(self.mean), tuple(self.deviation))


@dataclass(frozen=True, kw_only=True)
class TextLines:
    """The lines of a text as tokens, padded at the end with 0 to one length; the id of a line is its number, from 1."""

    splits: ClassVar[tuple[str, ...]] = ("all",)

    path: Annotated[Path, placement, a_file]
    """The file; a line ends with a line feed, or with a carriage return and a line feed."""
    context: Annotated[int, at_least(1)] = 64
    """Tokens of a sample; a longer line is refused."""
    encoding: Annotated[str, maths(neutral="utf-8")] = "utf-8"
    """Encoding of the files, as Python names it."""
    reference: Annotated[Path | None, placement, a_file] = None
    """The text that a model of `text_file` was trained on: its characters are the tokens. null: its bytes are."""
    ids: range = field(init=False, repr=False, compare=False)
    _rows: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = text_of(self.path, self.encoding).removesuffix("\n")
        lines = [line.removesuffix("\r") for line in text.split("\n")] if text else []
        numbers = self._numbers()
        rows = np.zeros((len(lines), self.context), dtype=np.uint8 if numbers is None else np.int32)
        for place, line in enumerate(lines):
            try:
                tokens = list(line.encode()) if numbers is None else [numbers[character] for character in line]
            except KeyError as error:
                rule = f"has the character {error}, which {self.reference} does not have."
                raise DataError(f"line {place + 1} of {self.path} {rule}") from None
            if len(tokens) > self.context:
                found = f"{len(tokens)} tokens, more than data.context={self.context}"
                raise DataError(f"line {place + 1} of {self.path} has {found}. Cut it, or use a larger one.")
            rows[place, : len(tokens)] = tokens
        object.__setattr__(self, "_rows", torch.from_numpy(rows))
        object.__setattr__(self, "ids", range(1, len(lines) + 1))

    def _numbers(self) -> dict[str, int] | None:
        if self.reference is None:
            return None
        known = sorted(set(text_of(self.reference, self.encoding, key="data.reference")))
        return {character: number for number, character in enumerate(known)}

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens of a line, (context,) int64."""
        return self._rows[index].to(torch.int64)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the tokens of many lines, (lines, context) int64."""
        return self._rows[indices].to(torch.int64)

    def as_stored(self) -> Stored:
        """Return the tokens in bytes, or in int32 for characters."""
        rows = self._rows
        samples = Samples(len(rows), rows.__getitem__, gather=rows.__getitem__)
        return Stored(samples=samples, widened=lambda batch: batch.to(torch.int64))
