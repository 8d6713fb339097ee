"""The code that `data` names in addition to its class: how samples form a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.config.sections import LoaderConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build_callable, hooks_in
from trainkit.data.reading.collate import CollateFunction, collate, shape_text
from trainkit.data.reading.iterable import Stream
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError, listed
from trainkit.numerics.batch import BatchPlan, Order, SampleOrder
from trainkit.numerics.generators import Untouched, generators_of, hash64, mix64_array
from trainkit.numerics.randomness import transform_key

_DRAWING: Final = 0x64726177
"""Separates draws by weight from the permutation of an epoch."""
_Code = TypeVar("_Code", bound="_UserCode")


@dataclass(frozen=True, kw_only=True)
class _UserCode:
    function: Callable[[Any], Any]
    name: str
    """The text of the config that names it."""


@dataclass(frozen=True, kw_only=True)
class UserCollate(_UserCode):
    """The function of `data.collate`, called with the samples of one shard.

    Example:
        >>> UserCollate(function=list, name="list")([3, 4], [0, 1])
        [3, 4]
    """

    def __call__(self, samples: Sequence[Any], indices: Sequence[int], /) -> Any:
        """Return the batch.

        Raises:
            DataError: the function fails, or its batch holds another number of samples.
        """
        try:
            batch = self.function(list(samples))
        except TrainkitError:
            raise
        except Exception as error:
            shapes = list(dict.fromkeys(shape_text(sample) for sample in samples))
            raise DataError(
                f"data.collate={self.name} fails on the samples {listed(indices, 8)}: {type(error).__name__}: {error}. "
                f"They are {'; '.join(shapes[:3])}{' ...' if len(shapes) > 3 else ''}."
            ) from error
        if not _holds(batch, len(samples)):
            raise DataError(
                f"data.collate={self.name} makes {shape_text(batch)} of the {len(samples)} samples "
                f"{listed(indices, 8)}: every sample must be in the batch once. To leave out samples, leave them out "
                "of the dataset."
            )
        return batch


def _holds(batch: Any, count: int) -> bool:
    """Return whether the sizes in a batch allow that it holds `count` samples.

    Vectors and lists have one element per sample; without them, the first or second dim of a tensor is the sample.
    """
    if isinstance(batch, tuple) and batch and isinstance(last := batch[-1], Tensor) and last.shape == (count,):
        return True  # inputs and a vector of targets, without a walk over the structure
    leaves = tree_leaves(batch, is_leaf=lambda part: isinstance(part, list))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.dim() == 1)}
    if sizes:
        return count in sizes
    return not tensors or any(count in tensor.shape[:2] for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class UserTransform(_UserCode):
    """The function of `data.batch_transform`, called with the batch of one shard, on its device."""

    def __call__(self, batch: Any, *, key: tuple[int, int, int], size: int, device: torch.device) -> Any:
        """Return the transformed batch; the generators of the training stay as they were.

        Args:
            batch: the batch of a shard.
            key: the run's seed, the step and the shard, which determine the random numbers.
            size: number of samples of the shard.
            device: the device of the batch.

        Raises:
            DataError: the function fails, or its batch holds another number of samples.
        """
        seed = transform_key(*key)
        where = f"shard {key[2]} of step {key[1]}"
        try:
            with Untouched(seed=seed, devices=[device]):
                for generator in generators_of([device]):
                    generator.manual_seed(seed)
                result = self.function(batch)
        except (TrainkitError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # a device also reports errors of kernels that were started before
        except Exception as error:
            raise DataError(
                f"data.batch_transform={self.name} fails on {where}: {type(error).__name__}: {error}. "
                f"The batch is {shape_text(batch)}."
            ) from error
        if not _holds(result, size):
            raise DataError(
                f"data.batch_transform={self.name} makes {shape_text(result)} of the {size} samples of {where}: the "
                "number of samples must stay."
            )
        return result


@dataclass(frozen=True, kw_only=True)
class UserSampler(_UserCode):
    """The function of `data.sampler`: from the training split to the weight of each sample."""

    _cumulative: dict[int, NDArray[np.float64]] = field(default_factory=dict, repr=False, compare=False)

    def cumulative(self, dataset: Any) -> NDArray[np.float64]:
        """Return (samples,) float64, the sums of the weights up to each sample; the function is called once per
        dataset.

        Raises:
            DataError: the function fails, or does not give one finite weight of at least 0 for each sample.
        """
        if id(dataset) not in self._cumulative:
            self._cumulative[id(dataset)] = np.cumsum(self._weights(dataset))
        return self._cumulative[id(dataset)]

    def _weights(self, dataset: Any) -> NDArray[np.float64]:
        try:
            with Untouched(seed=0):  # its random numbers are the same on every rank
                weights = np.asarray(self.function(dataset), dtype=np.float64)
        except TrainkitError:
            raise
        except Exception as error:
            raise DataError(f"data.sampler={self.name} fails: {type(error).__name__}: {error}") from error
        count = len(dataset)
        if weights.shape != (count,):
            wrong = f"gives weights of the shape {weights.shape} for {count} samples"
        elif not np.isfinite(weights).all() or (weights < 0).any():
            index = int(np.flatnonzero(~np.isfinite(weights) | (weights < 0))[0])
            wrong = f"gives sample {index} the weight {weights[index]}"
        elif not weights.any():
            wrong = "gives every sample the weight 0"
        else:
            return weights
        raise DataError(f"data.sampler={self.name} {wrong}: it must give each sample a weight of 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedOrder:
    """Draw the sample at each position of an epoch by weight, with replacement.

    The sample at a position depends on (seed, epoch, position) alone, so any range can be computed by itself.

    Example:
        >>> order = WeightedOrder(cumulative=np.cumsum([0.0, 1.0, 3.0]), seed=0)
        >>> np.bincount(order.indices(0, 0, 4000)).tolist()
        [0, 1028, 2972]
    """

    cumulative: NDArray[np.float64]
    """(samples,) sums of the weights up to each sample; the last is above 0."""
    seed: int
    """The run's seed."""

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions [start, stop) of an epoch, (stop - start,) int64."""
        positions = np.arange(start, stop, dtype=np.uint64)
        bits = mix64_array(np.uint64(hash64(self.seed, epoch, _DRAWING)) ^ positions)
        share = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        drawn = np.searchsorted(self.cumulative, share * self.cumulative[-1], side="right")
        # A product that rounds up to the whole sum must not lead past the last sample with a weight.
        last = np.searchsorted(self.cumulative, self.cumulative[-1], side="left")
        samples: NDArray[np.int64] = np.minimum(drawn, last).astype(np.int64)
        return samples


@dataclass(frozen=True, kw_only=True)
class DataHooks:
    """The functions that keys of `data` name, other than the keys of its class."""

    collate: UserCollate | None = None
    """Makes a batch of the samples of a shard; None: they are stacked."""
    transform: UserTransform | None = None
    """Changes the batch of a shard in training; None: no transform."""
    sampler: UserSampler | None = None
    """Gives the weights by which training samples are drawn; None: each is used once per epoch."""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> DataHooks:
        """Build the functions that a `data` node names.

        Raises:
            ConfigError: something cannot be imported or built.
        """
        hooks = hooks_in(node)

        def built(key: str, kind: type[_Code]) -> _Code | None:
            if (hook := hooks.get(key)) is None:
                return None
            name = hook if isinstance(hook, str) else str(hook[TARGET])
            return kind(function=build_callable(hook, f"data.{key}"), name=name)

        return cls(
            collate=built("collate", UserCollate),
            transform=built("batch_transform", UserTransform),
            sampler=built("sampler", UserSampler),
        )

    def refuse_misfits(self, dataset: Any, settings: LoaderConfig) -> None:
        """Refuse functions and settings that do not fit the training split; computes the weights of a sampler.

        Args:
            dataset: the training split.
            settings: the `loader` keys of the config.

        Raises:
            ConfigError: keys exclude each other, or one has no effect on this dataset.
            DataError: the sampler fails, or does not give a weight for each sample.
        """
        problems = []
        if isinstance(dataset, Stream):
            rules: dict[tuple[str, Any], str] = {
                ("loader.num_workers", settings.num_processes and settings.num_workers): (
                    "an iterable dataset is read by the training process, in its own order. Use 0, or give the dataset "
                    "__len__ and __getitem__, so that workers can read its samples."
                ),
                ("loader.cache", settings.cache is True): "an iterable dataset cannot be cached. Use auto.",
                ("data.sampler", self.sampler and self.sampler.name): (
                    "an iterable dataset has its own order. Use a map-style dataset, or leave it out."
                ),
            }
            problems = [Problem(key=key, value=value, rule=rule) for (key, value), rule in rules.items() if value]
        elif self.collate is not None and settings.cache is True:
            rule = "data.collate makes its batches of single samples. Use auto."
            problems = [Problem(key="loader.cache", value=True, rule=rule)]
        if problems:
            raise ConfigError(problems)
        if self.sampler is not None and not getattr(dataset, "is_declared", False):  # made-up samples have no weights
            self.sampler.cumulative(dataset)

    def order(self, dataset: Any, plan: BatchPlan, *, seed: int, shuffle: bool) -> Order:
        """Return which sample is at which position of an epoch."""
        if isinstance(dataset, Stream):
            return dataset.order(plan)
        if self.sampler is None:
            return SampleOrder(num_samples=len(dataset), seed=seed, shuffle=shuffle)
        return WeightedOrder(cumulative=self.sampler.cumulative(dataset), seed=seed)

    @property
    def collate_function(self) -> CollateFunction:
        """The function that makes a batch of samples: that of the config, or the one that stacks."""
        return collate if self.collate is None else self.collate


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings for reading the samples of a split, and the device of their batches."""

    device: torch.device
    """The device of the batches."""
    settings: LoaderConfig
    """The `loader` keys of the config."""
    hooks: DataHooks = field(default_factory=DataHooks)
    """Code that the keys of `data` name."""
    seed: int = 0
    """Keys the order and the random numbers of samples: the run's for training, 0 for an evaluation."""


def class_node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `data` node that belong to its class."""
    hooks = hooks_in(node)
    return {key: value for key, value in node.items() if key not in hooks}
