"""Synthetic data that can be learned: to try a setup, for tests and for benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from trainkit.data.declaration import Declared, image, label, window, with_defaults
from trainkit.data.stored import InMemory
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, unit, within
from trainkit.numerics.generators import hash64
from trainkit.objectives.fields import IGNORED


@dataclass(frozen=True, kw_only=True)
class _Generated:
    """The common part of these datasets: two splits of chosen sizes, determined by a seed."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Part of the dataset to use."""
    num_samples: Annotated[int, at_least(1), unit("samples")] = 1024
    """Number of training samples."""
    val_samples: Annotated[int, at_least(1), unit("samples")] = 256
    """Number of validation samples."""
    seed: int = 0
    """Seed of the data, independent of the run's."""

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        settings = with_defaults(cls, keys)
        count = settings["num_samples" if split == "train" else "val_samples"]
        return Declared(num_samples=count, draw=lambda generator: cls._example(settings, generator))

    @classmethod
    def _example(cls, keys: Mapping[str, Any], generator: Generator) -> Any:
        """Return a sample with the right structure, shapes and dtypes."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of samples in this split."""
        return self.num_samples if self.split == "train" else self.val_samples

    def _generator(self, *parts: int) -> Generator:
        return Generator().manual_seed(hash64(self.seed, *parts) & 0x7FFF_FFFF_FFFF_FFFF)


_SPLITS: Final = {"train": 0, "val": 1}


@dataclass(frozen=True, kw_only=True)
class Synthetic(_Generated):
    """Images or vectors around one prototype per class, with Gaussian noise.

    Sample i of a split is the same everywhere: it is drawn by a generator keyed by (seed, split, i), when it is read.
    Splits that fit in memory are generated once with `loader.cache=true`.

    Example:
        >>> data = Synthetic(split="train", shape=[3, 32, 32], num_classes=10, num_samples=100)
        >>> data[0][0].shape, int(data[13][1])
        (torch.Size([3, 32, 32]), 3)
    """

    shape: list[int] = field(default_factory=lambda: [64])
    """Shape of a sample: `[features]`, or `[channels, height, width]`."""
    num_classes: Annotated[int, at_least(1), unit("classes")] = 10
    """Number of classes; sample i has class i modulo this."""
    noise: Annotated[float, at_least(0)] = 1.0
    """Standard deviation of the noise; that of the prototypes is 1."""
    _prototypes: Tensor = field(init=False, repr=False, compare=False)

    @classmethod
    def _example(cls, keys: Mapping[str, Any], generator: Generator) -> Any:
        return image(generator, *keys["shape"]), label(generator, keys["num_classes"])

    def __post_init__(self) -> None:
        if len(self.shape) not in {1, 3} or min(self.shape) < 1:
            rule = "must be [features] or [channels, height, width], each 1 or more."
            raise ConfigError([Problem(key="data.shape", value=self.shape, rule=rule)])
        # For images, prototypes have at most 8 x 8 patches: a thousand classes of 224 x 224 pixels would be 600 MB.
        coarse = [*self.shape[:-2], *(min(size, 8) for size in self.shape[-2:])] if len(self.shape) == 3 else self.shape
        vars(self)["_prototypes"] = torch.randn(self.num_classes, *coarse, generator=self._generator(2))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a sample, `shape` float32, and its class."""
        label = index % self.num_classes
        noise = torch.randn(*self.shape, generator=self._generator(_SPLITS[self.split], index))
        prototype = self._prototypes[label : label + 1]
        if list(prototype.shape[1:]) != self.shape:
            prototype = functional.interpolate(prototype, size=self.shape[1:], mode="nearest")
        return prototype[0].add(noise, alpha=self.noise), label

    @property
    def labels(self) -> Tensor:
        """The class of every sample, (n,) int64, without reading any."""
        return torch.arange(len(self)) % self.num_classes


@dataclass(frozen=True, kw_only=True)
class SyntheticTokens(_Generated, InMemory):
    """Rows of tokens in which the next token is usually (5 x token + 3) modulo the vocabulary.

    With `min_context`, rows have random lengths and are padded, so that samples have unequal numbers of targets. A
    sample is inputs and targets, each (context,) int64.

    Example:
        >>> inputs, targets = SyntheticTokens(split="train", context=4, noise=0.0)[0]
        >>> bool((targets == (5 * inputs + 3) % 64).all())
        True
    """

    vocab_size: Annotated[int, at_least(1), unit("tokens")] = 64
    """Size of the vocabulary."""
    context: Annotated[int, at_least(1), unit("tokens")] = 32
    """Number of tokens of a sample."""
    min_context: Annotated[int | None, at_least(1), unit("tokens")] = None
    """Fewest tokens of a sample that count; the rest is padding. null: all count."""
    noise: Annotated[float, within(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of tokens that are replaced by random ones."""

    @classmethod
    def _example(cls, keys: Mapping[str, Any], generator: Generator) -> Any:
        return window(generator, keys["context"], keys["vocab_size"])

    def __post_init__(self) -> None:
        if self.min_context is not None and self.min_context > self.context:
            rule = f"larger than data.context={self.context}."
            raise ConfigError([Problem(key="data.min_context", value=self.min_context, rule=rule)])
        generator, count = self._generator(_SPLITS[self.split]), len(self)
        rows = torch.randint(self.vocab_size, (count, self.context + 1), generator=generator)
        keep = torch.rand(count, self.context + 1, generator=generator) >= self.noise
        for index in range(1, self.context + 1):
            rows[:, index] = torch.where(keep[:, index], (5 * rows[:, index - 1] + 3) % self.vocab_size, rows[:, index])
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
        if self.min_context is not None:
            lengths = torch.randint(self.min_context, self.context + 1, (count, 1), generator=generator)
            padding = torch.arange(self.context) >= lengths
            inputs.masked_fill_(padding, 0)
            targets.masked_fill_(padding, IGNORED)
        self._keep(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Friedman(_Generated, InMemory):
    """A synthetic regression of ten uniform features, of which five matter, with Gaussian noise.

    The target is 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise: the best root mean squared error is the
    deviation of the noise. Features have mean 0 and deviation 1. A sample is its features, (10,) float32, and its
    target, () float32.

    Source: Friedman 1991, "Multivariate adaptive regression splines", section 4.3.

    Example:
        >>> Friedman(split="val")[0][0].shape
        torch.Size([10])
    """

    num_samples: Annotated[int, at_least(1), unit("samples")] = 8000
    """Number of training rows."""
    val_samples: Annotated[int, at_least(1), unit("samples")] = 2000
    """Number of validation rows."""
    noise: Annotated[float, at_least(0)] = 1.0
    """Standard deviation of the noise; that of the target without it is 4.9."""

    @classmethod
    def _example(cls, _keys: Mapping[str, Any], generator: Generator) -> Any:
        return image(generator, 10), image(generator)

    def __post_init__(self) -> None:
        count = len(self)
        drawn = np.random.default_rng([self.seed, self.split == "val"])
        x = drawn.random((count, 10))
        target = 10 * np.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        target += self.noise * drawn.standard_normal(count)
        features = (x - 0.5) * math.sqrt(12)
        self._keep(*(torch.from_numpy(values.astype(np.float32)) for values in (features, target)))
