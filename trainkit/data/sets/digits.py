"""The embedded default: 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from trainkit.data.declaration import Declared, image, label
from trainkit.data.stored import InMemory


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
