"""The common part of datasets that are in memory as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainkit.data.stored import Normalisation, Samples, Stored


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Tensors of one length, of which each sample has one row; a derived class says their shapes and dtypes."""

    _arrays: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def _keep(self, *arrays: Tensor) -> None:
        """Keep the tensors of all samples: the inputs, and the targets if there are any."""
        object.__setattr__(self, "_arrays", arrays)

    def __len__(self) -> int:
        """Return the number of samples in this split."""
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a sample: its row of each tensor."""
        return tuple(array[index] for array in self._arrays)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all samples."""
        return self._arrays


@dataclass(frozen=True, kw_only=True)
class ImagesInMemory(InMemory):
    """Images with classes, kept in bytes: a sample is an image, (channels, height, width) float32, and its class."""

    _normalisation: Normalisation = field(init=False, repr=False, compare=False)

    def _keep_images(self, images: Tensor, classes: Tensor, normalisation: Normalisation) -> None:
        """Keep (samples, channels, height, width) uint8 images, and their (samples,) uint8 classes."""
        object.__setattr__(self, "_normalisation", normalisation)
        self._keep(images, classes)

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
        arrays = self._arrays
        samples = Samples(len(self), lambda index: tuple(array[index] for array in arrays), tensors=lambda: arrays)
        return Stored(samples=samples, widened=self._widened)

    def _widened(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        images, classes = batch
        return self._normalisation(images), classes.to(torch.int64)
