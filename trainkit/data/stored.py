"""Samples in the compact form of their dataset, which is copied to the device instead of wider samples.

Tokens are stored in two bytes and images in one byte per number; a model takes eight and four. A class with the method
`as_stored` gives its samples in the stored form; a loader reads, collates and copies these, and converts them to the
documented batch on the device that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from trainkit.data.reading.collate import collate, shape_text
from trainkit.errors import DataError
from trainkit.numerics.copies import constant_on
from trainkit.numerics.generators import Untouched

_READS: Final = ("__getitem__", "__getitems__", "gather", "tensors")
"""Methods of a dataset that return samples."""


@dataclass(frozen=True)
class Samples:
    """Random access to samples by functions.

    Example:
        >>> rows = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
        >>> samples = Samples(2, rows.__getitem__, gather=lambda indices: rows[indices])
        >>> len(samples), samples[1]
        (2, tensor([3, 4], dtype=torch.uint8))
    """

    count: int
    """Number of samples."""
    read: Callable[[int], Any]
    """Function that returns the sample at an index."""
    gather: Callable[[Tensor], Any] | None = None
    """Function that returns the batch at (n,) int64 indices; None: samples are read one by one."""
    tensors: Callable[[], Any] | None = None
    """Function that returns all samples as tensors, the first dim being the sample; None: they are not in memory."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.read(index)


@dataclass(frozen=True)
class Stored:
    """The samples of a split in stored form, as returned by `as_stored` of a dataset."""

    samples: Any
    """A dataset of equal length with `__getitem__`, and `gather` or `tensors` if the class has them; it draws the same
    random numbers as `__getitem__` of the class.
    """
    widened: Callable[[Any], Any]
    """Function that converts a batch of `samples` to the batch of the class, on its device; it draws no random
    numbers.
    """


def stored_of(dataset: Any) -> Stored | None:
    """Return the stored samples of a dataset; None if its class has no `as_stored`.

    A class that derives from one with `as_stored` and reads samples in its own way has none.

    Raises:
        DataError: the method returns something else.
    """
    order = type(dataset).__mro__
    index = next((index for index, kind in enumerate(order) if "as_stored" in vars(kind)), None)
    if index is None or any(name in vars(kind) for kind in order[:index] for name in _READS):
        return None
    stored = dataset.as_stored()
    if stored is not None and not isinstance(stored, Stored):
        name = type(dataset).__name__
        raise DataError(f"{name}.as_stored() returns a {type(stored).__name__}, not a trainkit.data.stored.Stored.")
    return stored


def refuse_other_samples(dataset: Any, stored: Stored) -> None:
    """Refuse a dataset whose first sample differs in its stored form.

    Raises:
        DataError: they differ, or one cannot be read.
    """
    with Untouched(seed=0):
        sample = collate([dataset[0]], [0])
    with Untouched(seed=0):
        wide = stored.widened(collate([stored.samples[0]], [0]))
    leaves, kind = tree_flatten(sample)
    others, other_kind = tree_flatten(wide)
    if kind != other_kind or not all(map(_are_equal, leaves, others)):
        name = type(dataset).__name__
        raise DataError(
            f"{name}.as_stored() gives {shape_text(wide)} for sample 0, which is {shape_text(sample)}: numbers, dtypes "
            "and shapes must be equal."
        )


def _are_equal(left: Any, right: Any) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return bool(left == right)
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and bool(((left == right) | (left.isnan() & right.isnan())).all())


def travelling_bytes(dataset: Any, sample: Any, *, collates: bool) -> int:
    """Return the bytes of a sample as a loader reads it and copies it to the device.

    Args:
        dataset: the training split, or its declaration.
        sample: one of its samples.
        collates: whether `data.collate` is set, which is called with the samples of the class.
    """
    declared = getattr(dataset, "stored_bytes", None) if getattr(dataset, "is_declared", False) else None
    if isinstance(declared, int) and not collates:
        return declared
    stored = None if collates else stored_of(dataset)
    if stored is not None:
        with Untouched(seed=0):
            sample = stored.samples[0]
    return sum(leaf.nbytes for leaf in tree_leaves(sample) if isinstance(leaf, Tensor | np.ndarray | np.generic))


@dataclass(frozen=True)
class Normalisation:
    """Convert images from bytes to float32 on their device: (byte / 255 - mean) / deviation, channel by channel.

    The divisors are tensors of the device: torch multiplies a CUDA tensor by the reciprocal of a number, which rounds
    differently from a division on the CPU.

    Example:
        >>> Normalisation((0.5,), (0.25,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-2.,  2.]]]])
    """

    mean: tuple[float, ...] = ()
    """Mean of each channel, between 0 and 1; empty: pixels stay from 0 to 1."""
    deviation: tuple[float, ...] = ()
    """Standard deviation of each channel."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return (images, channels, height, width) float32 of uint8 of the same shape."""
        wide = images.to(torch.float32).div_(_channels((255.0,), images.device))
        if self.mean:
            wide.sub_(_channels(self.mean, images.device)).div_(_channels(self.deviation, images.device))
        return wide


def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return (channels, 1, 1) float32 on a device."""
    return constant_on(values, torch.float32, device).view(-1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Tensors of one length with one row per sample; a derived class documents their shapes and dtypes."""

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
