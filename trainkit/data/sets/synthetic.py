"""Synthetic data that can be learned: to try a setup, for tests and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.data.declaration import Declared, image, label, window
from trainkit.data.reading.windows import IGNORED
from trainkit.data.stored import InMemory
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, unit, within
from trainkit.numerics.generators import hash64

_SHAPE_RULE: Final = "must be [features] or [channels, height, width], each 1 or more."
_SPLITS: Final = {"train": 0, "val": 1}


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Images or vectors around one prototype per class, with Gaussian noise.

    Sample i of a split is the same everywhere: it is drawn by a generator keyed by (seed, split, i), when it is read.
    Splits that fit in memory are generated once with `loader.cache=true`.

    Example:
        >>> data = Synthetic(split="train", shape=[3, 32, 32], num_classes=10, num_samples=100)
        >>> data[0][0].shape, int(data[13][1])
        (torch.Size([3, 32, 32]), 3)
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Part of the dataset to use."""
    shape: list[int] = field(default_factory=lambda: [64])
    """Shape of a sample: `[features]`, or `[channels, height, width]`."""
    num_classes: Annotated[int, at_least(1)] = 10
    """Number of classes; sample i has class i modulo this."""
    num_samples: Annotated[int, at_least(1)] = 1024
    """Number of training samples."""
    val_samples: Annotated[int, at_least(1)] = 256
    """Number of validation samples."""
    noise: Annotated[float, at_least(0)] = 1.0
    """Standard deviation of the noise; that of the prototypes is 1."""
    seed: int = 0
    """Seed of the data, independent of the run's."""
    _prototypes: Tensor = field(init=False, repr=False, compare=False)

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        count = keys.get("num_samples", 1024) if split == "train" else keys.get("val_samples", 256)
        shape, classes = keys.get("shape", [64]), keys.get("num_classes", 10)
        return Declared(num_samples=count, draw=lambda g: (image(g, *shape), label(g, classes)))

    def __post_init__(self) -> None:
        if len(self.shape) not in {1, 3} or min(self.shape) < 1:
            raise ConfigError([Problem(key="data.shape", value=self.shape, rule=_SHAPE_RULE)])
        object.__setattr__(self, "_prototypes", self._drawn_prototypes())

    def _drawn_prototypes(self) -> Tensor:
        # For images, prototypes have at most 8 x 8 patches: a thousand classes of 224 x 224 pixels would be 600 MB.
        coarse = [*self.shape[:-2], *(min(size, 8) for size in self.shape[-2:])] if len(self.shape) == 3 else self.shape
        return torch.randn(self.num_classes, *coarse, generator=_generator(self.seed, 2))

    def __len__(self) -> int:
        """Return the number of samples in this split."""
        return self.num_samples if self.split == "train" else self.val_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a sample, `shape` float32, and its class."""
        label = index % self.num_classes
        noise = torch.randn(*self.shape, generator=_generator(self.seed, _SPLITS[self.split], index))
        return self._full_size(self._prototypes[label : label + 1])[0].add(noise, alpha=self.noise), label

    @property
    def labels(self) -> Tensor:
        """The class of every sample, (n,) int64, without reading any."""
        return torch.arange(len(self)) % self.num_classes

    def _full_size(self, prototypes: Tensor) -> Tensor:
        if list(prototypes.shape[1:]) == self.shape:
            return prototypes
        return functional.interpolate(prototypes, size=self.shape[1:], mode="nearest")


@dataclass(frozen=True, kw_only=True)
class SyntheticTokens(InMemory):
    """Rows of tokens in which the next token is usually (5 x token + 3) modulo the vocabulary.

    With `min_context`, rows have random lengths and are padded, so that samples have unequal numbers of targets. A
    sample is inputs and targets, each (context,) int64.

    Example:
        >>> inputs, targets = SyntheticTokens(split="train", context=4, noise=0.0)[0]
        >>> bool((targets == (5 * inputs + 3) % 64).all())
        True
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Part of the dataset to use."""
    vocab_size: Annotated[int, at_least(1)] = 64
    """Size of the vocabulary."""
    context: Annotated[int, at_least(1)] = 32
    """Number of tokens of a sample."""
    min_context: Annotated[int | None, at_least(1)] = None
    """Fewest tokens of a sample that count; the rest is padding. null: all count."""
    num_samples: Annotated[int, at_least(1)] = 1024
    """Number of training samples."""
    val_samples: Annotated[int, at_least(1)] = 256
    """Number of validation samples."""
    noise: Annotated[float, within(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of tokens that are replaced by random ones."""
    seed: int = 0
    """Seed of the data, independent of the run's."""

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        count = keys.get("num_samples", 1024) if split == "train" else keys.get("val_samples", 256)
        context, vocab_size = keys.get("context", 32), keys.get("vocab_size", 64)
        return Declared(num_samples=count, draw=lambda g: window(g, context, vocab_size))

    def __post_init__(self) -> None:
        if self.min_context is not None and self.min_context > self.context:
            rule = f"larger than data.context={self.context}."
            raise ConfigError([Problem(key="data.min_context", value=self.min_context, rule=rule)])
        self._keep(*self._drawn())

    def _drawn(self) -> tuple[Tensor, Tensor]:
        generator = _generator(self.seed, _SPLITS[self.split])
        count = self.num_samples if self.split == "train" else self.val_samples
        rows = torch.randint(self.vocab_size, (count, self.context + 1), generator=generator)
        keep = torch.rand(count, self.context + 1, generator=generator) >= self.noise
        for place in range(1, self.context + 1):
            rows[:, place] = torch.where(keep[:, place], (5 * rows[:, place - 1] + 3) % self.vocab_size, rows[:, place])
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        if self.min_context is not None:
            lengths = torch.randint(self.min_context, self.context + 1, (count, 1), generator=generator)
            padding = torch.arange(self.context) >= lengths
            inputs.masked_fill_(padding, 0)
            targets.masked_fill_(padding, IGNORED)
        return inputs, targets


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash64(*parts) & 0x7FFF_FFFF_FFFF_FFFF)
