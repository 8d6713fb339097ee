"""Collates for `data.collate`: they make one batch of the samples of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from trainkit.data.reading.collate import stack
from trainkit.errors import DataError
from trainkit.fields import at_least
from trainkit.objectives.fields import IGNORED, TARGETS, Field, tuple_like


@dataclass(frozen=True, kw_only=True)
class _Pad:
    """The common part of the collates that pad fields to one shape; other fields are stacked."""

    padding: float = 0
    """The value of padded places, except in the target."""
    target_padding: float = IGNORED
    """The value of padded places in the target; -100 is ignored by all losses of trainkit over classes or tokens."""
    target: Field | None = None
    """The field of the target; null: the last of a tuple, or target, targets, y, label or labels of a dict."""
    multiple_of: Annotated[int, at_least(1)] = 1
    """Pad to a multiple of this, such as the stride of the model."""

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch."""
        columns, first, target = _columns(samples), samples[0], self.target
        if target is None and isinstance(first, tuple | list):
            target = len(columns) - 1 if len(columns) > 1 else None
        elif target is None:
            target = next((name for name in TARGETS if name in columns), None)
        batch, padded = dict[Any, Any](), list[Tensor]()
        for name, column in columns.items():
            tensors = _tensors(column)
            shape = None if tensors is None else self._shape(tensors)
            if tensors is None or shape is None:
                batch[name] = stack(column)
            else:
                batch[name] = _padded(tensors, shape, self.target_padding if name == target else self.padding)
                padded = padded or tensors
        return _like(first, self._with_mask(batch, padded))

    def _shape(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """Return the shape that the values of a field are padded to; None: the field is not padded."""
        raise NotImplementedError

    def _with_mask(self, batch: dict[Any, Any], _padded: Sequence[Tensor]) -> dict[Any, Any]:
        """Return the batch with a mask of the first field that was padded, if a class adds one."""
        return batch

    def _rounded(self, size: int) -> int:
        return -(-size // self.multiple_of) * self.multiple_of


@dataclass(frozen=True, kw_only=True)
class PadSequences(_Pad):
    """Pad sequences at their end to the longest of the shard, and stack them; numbers are stacked.

    A sequence is a tensor (length, ...) or a list of numbers.

    Example:
        >>> samples = [(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])), (torch.tensor([7]), torch.tensor([8]))]
        >>> PadSequences()(samples)
        (tensor([[1, 2, 3],
                [7, 0, 0]]), tensor([[   2,    3,    4],
                [   8, -100, -100]]))
    """

    length: Annotated[int | None, at_least(1)] = None
    """Pad to this length instead: batches then do not depend on how a step is cut. A longer sequence is refused."""
    mask: str | None = None
    """Add a field of this name to dict samples, (samples, length) int64: 1 where the first sequence has a value."""

    def _shape(self, tensors: Sequence[Tensor]) -> list[int] | None:
        if tensors[0].dim() == 0:
            return None
        longest = max(len(tensor) for tensor in tensors)
        if self.length is not None and longest > self.length:
            raise DataError(f"a sequence of length {longest} is longer than data.collate.length={self.length}.")
        return [self._rounded(self.length or longest), *tensors[0].shape[1:]]

    def _with_mask(self, batch: dict[Any, Any], padded: Sequence[Tensor]) -> dict[Any, Any]:
        if self.mask is None:
            return batch
        if not all(isinstance(name, str) for name in batch):
            raise DataError(
                "data.collate.mask names a field, and the samples are not dicts. Give dicts, or leave it out."
            )
        if (shape := self._shape(padded) if padded else None) is None:
            raise DataError("data.collate.mask needs a sequence, and a sample has none.")
        lengths = torch.tensor([len(tensor) for tensor in padded])
        return {**batch, self.mask: (torch.arange(shape[0]) < lengths.unsqueeze(1)).long()}


@dataclass(frozen=True, kw_only=True)
class PadImages(_Pad):
    """Pad images of several sizes at their right and bottom to the largest of the shard, and stack them.

    An image is a tensor (..., height, width); a target of the same kind, such as a mask of classes, is padded in the
    same way.

    Example:
        >>> batch = PadImages()([(torch.ones(3, 4, 2), 0), (torch.ones(3, 1, 5), 1)])
        >>> batch[0].shape, batch[1]
        (torch.Size([2, 3, 4, 5]), tensor([0, 1]))
    """

    def _shape(self, tensors: Sequence[Tensor]) -> list[int] | None:
        if tensors[0].dim() < 2:
            return None
        largest = [max(tensor.shape[dim] for tensor in tensors) for dim in (-2, -1)]
        return [*tensors[0].shape[:-2], *map(self._rounded, largest)]


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Keep the values of each field as a list, for models that take images of several sizes, such as detectors.

    Example:
        >>> images, boxes = Lists()([(torch.ones(3, 4, 2), {"n": 1}), (torch.ones(3, 1, 5), {"n": 0})])
        >>> [tuple(image.shape) for image in images], boxes
        ([(3, 4, 2), (3, 1, 5)], [{'n': 1}, {'n': 0}])
    """

    stacked: list[Field] = field(default_factory=list)
    """Fields to stack nevertheless."""

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch."""
        columns = _columns(samples)
        return _like(samples[0], {name: stack(c) if name in self.stacked else list(c) for name, c in columns.items()})


@dataclass(frozen=True, kw_only=True)
class Dicts:
    """Collate each field of dicts or dataclasses in its own way; all other fields are stacked.

    Example:
        >>> samples = [{"words": torch.tensor([5, 6]), "n": 2}, {"words": torch.tensor([7]), "n": 1}]
        >>> batch = Dicts(pad={"words": 0})(samples)
        >>> batch["words"].tolist(), batch["n"].tolist()
        ([[5, 6], [7, 0]], [2, 1])
    """

    pad: dict[str, float] = field(default_factory=dict)
    """Fields to pad at the end of every dim to the largest of the shard -> the value of padded places."""
    keep: list[str] = field(default_factory=list)
    """Fields that stay a list."""
    drop: list[str] = field(default_factory=list)
    """Fields to leave out."""

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the batch."""
        columns = _columns(samples)
        unknown = [name for name in (*self.pad, *self.keep, *self.drop) if name not in columns]
        if unknown:
            names = ", ".join(map(str, columns))
            raise DataError(f"data.collate names {', '.join(unknown)}, and a sample has {names}.")
        return {name: self._field(name, column) for name, column in columns.items() if name not in self.drop}

    def _field(self, name: str, column: Sequence[Any]) -> Any:
        if name in self.keep:
            return list(column)
        if name not in self.pad:
            return stack(column)
        tensors = [torch.as_tensor(value) for value in column]
        largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        return _padded(tensors, largest, self.pad[name])


def _columns(samples: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return field -> its value in each sample; a sample that is not a container has one field."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: [sample[key] for sample in samples] for key in first}
    if is_dataclass(first):
        return {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(first)}
    if isinstance(first, tuple | list):
        return dict(enumerate(map(list, zip(*samples, strict=True))))
    return {None: list(samples)}


def _like(sample: Any, batch: dict[Any, Any]) -> Any:
    """Return the fields of a batch in the structure of a sample; a dataclass becomes a dict."""
    if isinstance(sample, tuple | list):
        return tuple_like(sample, batch.values())
    return batch.get(None, batch)


def _tensors(column: Sequence[Any]) -> list[Tensor] | None:
    """Return the values of a field as tensors; None for text and other objects."""
    try:
        return [torch.as_tensor(value) for value in column]
    except (TypeError, ValueError, RuntimeError):
        return None


def _padded(tensors: Sequence[Tensor], shape: Sequence[int], value: float) -> Tensor:
    """Return one tensor with each tensor in the first corner of its place; the rest is filled with a value."""
    batch = tensors[0].new_full((len(tensors), *shape), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return batch
