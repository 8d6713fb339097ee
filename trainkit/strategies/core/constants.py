"""What crosses the boundary of a block: tensors, immutable values, and the containers that hold them.

Containers that torch can take apart and put together again (tuples, lists, dicts, and the classes that are registered
with `torch.utils._pytree`) are made anew from their leaves. Any other object that can change is one object for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, NotImplementedType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["first_mutable", "is_immutable", "same_constant"]

_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    Enum,
    PurePath,
    EllipsisType,
    NotImplementedType,
    BuiltinFunctionType,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_immutable(value: Any) -> bool:
    """Return whether a value is the same in every pass: nothing in it can be changed.

    Example:
        >>> is_immutable(torch.float32), is_immutable((1, "two")), is_immutable(object()), is_immutable({1})
        (True, True, False, False)
    """
    if isinstance(value, _IMMUTABLE):
        return True
    parts = _parts(value)
    return parts is not None and all(map(is_immutable, parts))


def _parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a value that cannot be changed itself; None for any other value."""
    if isinstance(value, tuple | frozenset):
        return value
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, FunctionType):
        return _kept_by(value)
    if is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009 - typed stubs lack it
        return [getattr(value, one.name) for one in fields(value)]
    return None


def first_mutable(tree: Any) -> Any:
    """Return the first object of a tree that is neither a tensor nor immutable; None where there is none."""
    leaves = tree_flatten(tree)[0]
    return next((leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_immutable(leaf)), None)


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two values of two passes are the same: one object, or equal immutable values.

    A function that a pass makes is another object in the next pass: its code and what it closes over are compared.

    Example:
        >>> same_constant(lambda x: x, 3), same_constant((1, 2.0), (1, 2.0)), same_constant(object(), object())
        (False, True, False)
    """
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and all(map(same_constant, _kept_by(one), _kept_by(other)))
    if isinstance(one, partial):
        parts, others = ((p.func, *p.args, *p.keywords.values()) for p in (one, other))
        return len(parts) == len(others) and all(map(same_constant, parts, others))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_constant, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - two NaN are the same


def _kept_by(function: FunctionType) -> Iterator[Any]:
    """Yield the values that a function keeps between calls: the variables that it closes over, and its defaults."""
    for cell in function.__closure__ or ():
        yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
