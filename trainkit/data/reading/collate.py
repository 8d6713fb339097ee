"""Collate samples into a batch, and cut a batch into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import DataError


class CollateFunction(Protocol):
    """Function that makes a batch of samples."""

    def __call__(self, samples: Sequence[Any], indices: Sequence[int], /) -> Any:
        """Return the batch; `indices` are the indices of the samples in the dataset, for messages."""


MoveBatch = Callable[[Any], Any]
"""Function that returns a batch of any structure on the device of a loader."""


REMEDY: Final = "Samples of several sizes need a collate: data.collate=PACKAGE.FUNCTION (docs/data.md)."
"""Advice about samples that cannot be stacked."""


def collate(samples: Sequence[Any], indices: Sequence[int]) -> Any:
    """Stack samples into one batch: tensors, arrays and numbers become tensors, text stays a list.

    A batch has the structure of a sample: a tuple of tensors, a dict of them, or any nesting of the two; a dataclass
    becomes a dict of its fields. Integers become int64, floats float32 (torch's default dtype).

    Args:
        samples: at least one sample, all of one structure.
        indices: their indices in the dataset; for messages only.

    Raises:
        DataError: a sample differs from the first, or cannot be converted to tensors; names its index.

    Example:
        >>> collate([(torch.zeros(2), 1), (torch.ones(2), 0)], [4, 9])
        (tensor([[0., 0.],
                [1., 1.]]), tensor([1, 0]))
    """
    try:
        return stack(samples)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(_first_odd_one(samples, indices, error)) from error


def stack(column: Sequence[Any]) -> Any:
    """Stack the values of one field of some samples.

    Raises:
        TypeError: there is no batch of such values.
        ValueError: arrays or structures differ.
        RuntimeError: tensors differ in shape.
        KeyError: dicts differ in their keys.
    """
    if is_dataclass(first := column[0]):
        column = [{one.name: getattr(sample, one.name) for one in fields(sample)} for sample in column]
        first = column[0]
    if isinstance(first, Tensor):
        return torch.stack(tuple(column))
    if isinstance(first, tuple | list):
        return tuple(stack(part) for part in zip(*column, strict=True))
    if isinstance(first, np.ndarray | np.generic):
        return torch.from_numpy(np.stack(column))
    if isinstance(first, bool | int | float):
        return torch.tensor(column)
    if isinstance(first, Mapping):
        return {key: stack([_require_same_keys(sample, first)[key] for sample in column]) for key in first}
    if isinstance(first, str | bytes):
        return list(column)
    raise TypeError(f"a {type(first).__name__} cannot become part of a batch")


def _require_same_keys(sample: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    if sample.keys() != first.keys():
        raise KeyError("other keys")
    return sample


def _first_odd_one(samples: Sequence[Any], indices: Sequence[int], error: Exception) -> str:
    """Find the sample that causes the error: the first one that cannot be collated alone, or together with sample 0."""
    for sample, index in zip(samples, indices, strict=True):
        try:
            stack([sample])
        except (TypeError, ValueError, RuntimeError) as alone:
            return f"sample {index} cannot be part of a batch: {alone}."
    for sample, index in zip(samples, indices, strict=True):
        try:
            stack([samples[0], sample])
        except (TypeError, ValueError, RuntimeError, KeyError):
            return (
                f"sample {index} cannot be in a batch with sample {indices[0]}: "
                f"{shape_text(sample)} differs from {shape_text(samples[0])}. {REMEDY}"
            )
    return f"samples {indices[0]} to {indices[-1]} cannot be stacked: {error}"


def shape_text(sample: Any) -> str:
    """Return the structure of a sample or batch with dtypes and shapes, for messages.

    Example:
        >>> shape_text({"x": torch.zeros(2, 3), "y": 1})
        '{x: float32 (2, 3), y: int}'
    """
    if isinstance(sample, Tensor | np.ndarray):
        return f"{sample.dtype} {tuple(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, tuple | list):
        return f"({', '.join(shape_text(part) for part in sample)})"
    if is_dataclass(sample) and not isinstance(sample, type):
        return f"{type(sample).__name__}" + shape_text({one.name: getattr(sample, one.name) for one in fields(sample)})
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_text(part)}" for key, part in sample.items()) + "}"
    return type(sample).__name__


def narrow(batch: Any, start: int, size: int) -> Any:
    """Return a range of a batch: views, no copies. To autograd each is a tensor of its own: a model may write into its
    inputs, also what it differentiates.

    Example:
        >>> narrow((torch.arange(4), ["a", "b", "c", "d"]), 1, 2)
        (tensor([1, 2]), ['b', 'c'])
    """
    if isinstance(batch, Tensor):
        return batch.narrow(0, start, size).data
    if isinstance(batch, tuple):
        return tuple(narrow(part, start, size) for part in batch)
    if isinstance(batch, dict):
        return {key: narrow(part, start, size) for key, part in batch.items()}
    return batch[start : start + size]


def shards_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into its shards, as views."""
    shards, start = [], 0
    for size in sizes:
        shards.append(narrow(batch, start, size))
        start += size
    return shards


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors that `to_device` moves, in its order; objects with a method `to` move their own content."""
    if isinstance(batch, Tensor):
        yield batch
    elif not callable(getattr(batch, "to", None)) and isinstance(batch, tuple | dict | list):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_in(part)


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Return the batch on a device. A copy from pinned memory is asynchronous to the host.

    Objects that are neither tensors nor containers stay as they are, unless they have a method `to`.

    Args:
        batch: of any structure.
        device: the target device.
        move: moves each tensor of `tensors_in`; None: torch does.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True) if move is None else move(batch)
    if callable(getattr(batch, "to", None)):  # a packed sequence, a batch of transformers
        return batch.to(device)
    if isinstance(batch, tuple):
        return tuple(to_device(part, device, move) for part in batch)
    if isinstance(batch, dict):
        return {key: to_device(part, device, move) for key, part in batch.items()}
    if isinstance(batch, list):
        return [to_device(part, device, move) for part in batch]
    return batch
