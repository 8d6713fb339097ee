"""Tensors that are read when they are asked for: a checkpoint larger than this process's memory can be taken over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["LazyStateDict", "model_weights", "name_in", "read_slice", "select", "shape_of"]


class LazyStateDict(Mapping[str, Tensor]):
    """Tensors by name on the host; each look at one may read it anew, so a user of several parts keeps it."""

    @abstractmethod
    def shape_of(self, name: str) -> torch.Size:
        """The shape of a tensor; nothing is read."""

    @abstractmethod
    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A part of a tensor; no more is read than what was written together with it."""


def name_in(key: str) -> str:
    """The canonical name of the parameter or buffer that a key of a checkpoint is about.

    Example:
        >>> name_in("param/head.weight"), name_in("optimizer/exp_avg/head.weight")
        ('head.weight', 'head.weight')
    """
    kind, _, rest = key.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """The shape of a tensor, which is read only where the mapping cannot tell.

    Example:
        >>> shape_of({"param/w": torch.zeros(2, 3)}, "param/w")
        torch.Size([2, 3])
    """
    return tensors.shape_of(name) if isinstance(tensors, LazyStateDict) else tensors[name].shape


def read_slice(tensors: Mapping[str, Tensor], name: str, region: tuple[slice, ...]) -> Tensor:
    """A part of a tensor, without the rest where the mapping can do so.

    Example:
        >>> read_slice({"param/w": torch.arange(6).reshape(3, 2)}, "param/w", (slice(1, 2), slice(0, 2)))
        tensor([[2, 3]])
    """
    return tensors.region_of(name, region) if isinstance(tensors, LazyStateDict) else tensors[name][region]


def select(tensors: Mapping[str, Tensor], chooses: Callable[[str], bool]) -> Mapping[str, Tensor]:
    """Those whose names are chosen, read no earlier than before.

    Example:
        >>> sorted(select({"param/w": torch.zeros(2), "optimizer/step/w": torch.ones(())}, lambda n: n[0] == "p"))
        ['param/w']
    """
    return _Chosen(tensors, chooses)


def model_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those of a checkpoint that are no optimizer's, read no earlier than before."""
    return select(tensors, lambda key: not key.startswith("optimizer/"))


class _Chosen(LazyStateDict):
    def __init__(self, tensors: Mapping[str, Tensor], chooses: Callable[[str], bool]) -> None:
        self._tensors = tensors
        self._names = {name: None for name in tensors if chooses(name)}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._known(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape_of(self, name: str) -> torch.Size:
        return shape_of(self._tensors, self._known(name))

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        return read_slice(self._tensors, self._known(name), region)

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise KeyError(name)
        return name
