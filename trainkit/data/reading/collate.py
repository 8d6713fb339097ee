"""Collate samples into a batch, and cut a batch into shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import DataError

__all__ = ["collate", "narrow", "to_device"]


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
        return _stack(samples)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(_first_odd_one(samples, indices, error)) from error


def _stack(column: Sequence[Any]) -> Any:
    if is_dataclass(first := column[0]):
        column = [{one.name: getattr(sample, one.name) for one in fields(sample)} for sample in column]
        first = column[0]
    if isinstance(first, Tensor):
        return torch.stack(tuple(column))
    if isinstance(first, tuple | list):
        return tuple(_stack(part) for part in zip(*column, strict=True))
    if isinstance(first, np.ndarray | np.generic):
        return torch.from_numpy(np.stack(column))
    if isinstance(first, bool | int | float):
        return torch.tensor(column)
    if isinstance(first, Mapping):
        return {key: _stack([_require_same_keys(sample, first)[key] for sample in column]) for key in first}
    if isinstance(first, str | bytes):
        return list(column)
    raise TypeError(f"a {type(first).__name__} cannot become part of a batch")


def _require_same_keys(sample: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    if sample.keys() != first.keys():
        raise KeyError("other keys")
    return sample


def _first_odd_one(samples: Sequence[Any], indices: Sequence[int], error: Exception) -> str:
    """Find the sample that causes the error: the first that cannot be collated alone, or with the first."""
    for sample, index in zip(samples, indices, strict=True):
        try:
            _stack([sample])
        except (TypeError, ValueError, RuntimeError) as alone:
            return f"sample {index} cannot be part of a batch: {alone}."
    for sample, index in zip(samples, indices, strict=True):
        try:
            _stack([samples[0], sample])
        except (TypeError, ValueError, RuntimeError, KeyError):
            return (
                f"sample {index} cannot stand in a batch with sample {indices[0]}: "
                f"{_shape(sample)} beside {_shape(samples[0])}."
            )
    return f"samples {indices[0]} to {indices[-1]} cannot be stacked: {error}"


def _shape(sample: Any) -> str:
    if isinstance(sample, Tensor | np.ndarray):
        return f"{sample.dtype} {tuple(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, tuple | list):
        return f"({', '.join(_shape(part) for part in sample)})"
    if is_dataclass(sample) and not isinstance(sample, type):
        return f"{type(sample).__name__}" + _shape({one.name: getattr(sample, one.name) for one in fields(sample)})
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(part)}" for key, part in sample.items()) + "}"
    return type(sample).__name__


def narrow(batch: Any, start: int, size: int) -> Any:
    """Return a range of a batch: views, no copies.

    Example:
        >>> narrow((torch.arange(4), ["a", "b", "c", "d"]), 1, 2)
        (tensor([1, 2]), ['b', 'c'])
    """
    if isinstance(batch, Tensor):
        return batch.narrow(0, start, size)
    if isinstance(batch, tuple):
        return tuple(narrow(part, start, size) for part in batch)
    if isinstance(batch, dict):
        return {key: narrow(part, start, size) for key, part in batch.items()}
    return batch[start : start + size]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on a device. A copy from pinned memory is asynchronous to the host."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple):
        return tuple(to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: to_device(part, device) for key, part in batch.items()}
    return batch
