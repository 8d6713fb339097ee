"""Tensors that are read on access, so that a checkpoint larger than this process's memory can be restored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from trainkit.adapters.average import AVERAGE


class LazyStateDict(Mapping[str, Tensor]):
    """Tensors by name on the host; each access may read a tensor again, so callers that need several parts should keep
    it.
    """

    @abstractmethod
    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a tensor without reading it."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""

    @abstractmethod
    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor; only the pieces that contain it are read."""


def name_in(key: str) -> str:
    """Return the canonical name of the parameter or buffer of a checkpoint key.

    Example:
        >>> name_in("param/head.weight"), name_in("optimizer/exp_avg/head.weight")
        ('head.weight', 'head.weight')
    """
    kind, _, rest = key.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor, which is read only if the mapping is not lazy.

    Example:
        >>> shape_of({"param/w": torch.zeros(2, 3)}, "param/w")
        torch.Size([2, 3])
    """
    return tensors.shape_of(name) if isinstance(tensors, LazyStateDict) else tensors[name].shape


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """Return the dtype of a tensor, which is read only if the mapping is not lazy.

    Example:
        >>> dtype_of({"param/w": torch.zeros(2, 3)}, "param/w")
        torch.float32
    """
    return tensors.dtype_of(name) if isinstance(tensors, LazyStateDict) else tensors[name].dtype


def read_slice(tensors: Mapping[str, Tensor], name: str, region: tuple[slice, ...]) -> Tensor:
    """Return a part of a tensor, without reading the rest if the mapping is lazy.

    Example:
        >>> read_slice({"param/w": torch.arange(6).reshape(3, 2)}, "param/w", (slice(1, 2), slice(0, 2)))
        tensor([[2, 3]])
    """
    return tensors.region_of(name, region) if isinstance(tensors, LazyStateDict) else tensors[name][region]


def select(tensors: Mapping[str, Tensor], chooses: Callable[[str], bool]) -> Mapping[str, Tensor]:
    """Return the tensors whose names are chosen, still read lazily.

    Example:
        >>> sorted(select({"param/w": torch.zeros(2), "optimizer/step/w": torch.ones(())}, lambda n: n[0] == "p"))
        ['param/w']
    """
    return _Renamed(tensors, {name: name for name in tensors if chooses(name)})


def model_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint except those of the optimizer and of callbacks, still read lazily."""
    return select(tensors, lambda key: not key.startswith(("optimizer/", "callback/")))


def averaged_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of a checkpoint, those with an average replaced by their average, still read
    lazily.

    Example:
        >>> found = averaged_weights({"param/w": torch.zeros(1), "optimizer/average/w": torch.ones(1)})
        >>> dict(found)
        {'param/w': tensor([1.])}
    """
    averages = {name: f"optimizer/{AVERAGE}/{name_in(name)}" for name in model_weights(tensors)}
    return _Renamed(tensors, {name: key if key in tensors else name for name, key in averages.items()})


class _Renamed(LazyStateDict):
    """Tensors of a mapping by other names."""

    def __init__(self, tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> None:
        self._tensors, self._keys = tensors, keys

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._keys[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def shape_of(self, name: str) -> torch.Size:
        return shape_of(self._tensors, self._keys[name])

    def dtype_of(self, name: str) -> torch.dtype:
        return dtype_of(self._tensors, self._keys[name])

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        return read_slice(self._tensors, self._keys[name], region)
