"""The embedded default: 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Digits:
    """The UCI digits that ship with trainkit (see digits.LICENSE), 1,437 to train on and 360 to validate on.

    The split is stored with the data: stratified by class, drawn once, the same for all users.

    Example:
        >>> digits = Digits(split="val")
        >>> len(digits), digits[0][0].shape
        (360, torch.Size([1, 8, 8]))
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Which part."""
    scaling: Literal["unit", "standard"] = "unit"
    """`unit`: pixels from 0 to 1; `standard`: mean 0 and deviation 1 over all pixels of the training part."""
    _arrays: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_arrays", self._load())

    def _load(self) -> tuple[Tensor, Tensor]:
        with files("trainkit.data").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
            pixels, labels, val = stored["pixels"], stored["labels"], stored["val"]
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[val] = True
        scaled = (pixels / 16).astype(np.float32)
        if self.scaling == "standard":
            scaled = (scaled - scaled[~held_out].mean()) / scaled[~held_out].std()
        chosen = held_out if self.split == "val" else ~held_out
        images = torch.from_numpy(scaled[chosen]).unsqueeze(1)
        return images, torch.from_numpy(labels[chosen].astype(np.int64))

    def __len__(self) -> int:
        """Return the number of images in this split."""
        return len(self._arrays[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return an image, (1, 8, 8) float32, and its class, () int64."""
        images, labels = self._arrays
        return images[index], labels[index]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all images, (n, 1, 8, 8) float32, and their classes, (n,) int64."""
        return self._arrays
