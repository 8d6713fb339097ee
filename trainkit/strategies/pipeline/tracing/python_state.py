"""Detect side effects of a forward pass outside of torch: changed attributes, passed objects, set seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, NotImplementedType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trainkit.strategies.maps.syntax import Block
from trainkit.strategies.object_snapshot import ObjectSnapshot, cache_switch, class_name

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
    """Return whether a value is immutable, including its parts, so that every pass has the same value.

    Example:
        >>> is_immutable(torch.float32), is_immutable((1, "two")), is_immutable(object()), is_immutable({1})
        (True, True, False, False)
    """
    if isinstance(value, _IMMUTABLE):
        return True
    parts = _parts(value)
    return parts is not None and all(map(is_immutable, parts))


def _parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a container that is immutable itself; None for any other value."""
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
    """Return the first object of a tree that is neither a tensor nor immutable; None if there is none."""
    leaves = tree_flatten(tree)[0]
    return next((leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_immutable(leaf)), None)


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two values of two passes are the same: one object, or equal immutable values.

    A function created in a pass is a different object in the next pass: its code and its closure are compared.

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
    """Yield the values that a function keeps between calls: its closure variables and its defaults."""
    for cell in function.__closure__ or ():
        yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


_ELSEWHERE: Final = "or use strategy=mirrored."


class CannotCut(Exception):  # noqa: N818 - callers turn it into a problem or an error
    """A forward pass that cannot be recorded, with the reason and a sentence about the remedy."""

    def __init__(self, reason: str, *, remedy: str = "Use strategy=fsdp.") -> None:
        super().__init__(reason)
        self.remedy = remedy


class PythonState:
    """The state of Python objects around each block of one forward pass.

    A block may change its own attributes in its calls: every pass calls it, on one rank. Other changes are only visible
    to a pass that runs the model's own code.
    """

    def __init__(self, model: nn.Module, units: Sequence[Block]) -> None:
        self._outside = contents_outside(model, units)
        self._modules = {unit.name: unit.owners for unit in units}
        self._blocks = {unit.name: ObjectSnapshot(unit.owners) for unit in units}
        self._arguments: ObjectSnapshot | None = None
        self._seed = torch.default_generator.initial_seed()

    def before_block(self, name: str, args: Any) -> None:
        """Refuse changes of the model's own code since the previous block, and store the arguments of this block."""
        self._own_code(f"before the block {name}")
        self._block(name)
        self._arguments = ObjectSnapshot([("", args)])

    def after_block(self, name: str) -> None:
        """Refuse changes of a block that are visible outside of it."""
        assert self._arguments is not None
        kind = self._arguments.changed_class()
        if kind is not None:
            raise CannotCut(
                f"the block {name} changes the {kind} among its arguments, which a pipeline copies for every block",
                remedy=f"Return what it adds, {_ELSEWHERE}",
            )
        for path, kind in self._outside.changed():
            raise CannotCut(
                f"the block {name} changes {path} ({kind}), which is not its own",
                remedy=f"Return it, {_ELSEWHERE}",
            )
        self._blocks[name] = ObjectSnapshot(self._modules[name])
        self._seed = torch.default_generator.initial_seed()

    def before_function(self, title: str) -> None:
        """Refuse a seed that the model's own code has set."""
        if torch.default_generator.initial_seed() != self._seed:
            raise CannotCut(
                f"its own code seeds torch's generator before it calls {title}",
                remedy=f"Leave the seed to seed=N, {_ELSEWHERE}",
            )

    def at_the_end(self) -> None:
        """Refuse changes since the last block."""
        self._own_code("after its last block")
        for name in self._blocks:
            self._block(name)

    def _own_code(self, where: str) -> None:
        for path, kind in self._outside.changed():
            raise CannotCut(
                f"its own code changes {path} ({kind}) {where}, and a pipeline runs that code once",
                remedy=f"Compute it from the inputs, move it into a block, {_ELSEWHERE}",
            )

    def _block(self, name: str) -> None:
        for path, kind in self._blocks[name].changed():
            raise CannotCut(
                f"{path} ({kind}) of the block {name} is changed outside of the block",
                remedy=f"Pass it as an argument, {_ELSEWHERE}",
            )


def refused_object(crossing: str, found: Any, model: nn.Module) -> CannotCut:
    """Return the error for an object that crosses a block's boundary."""
    reason = f"{crossing} an object of the class {class_name(found)}, which would be the same object in every pass"
    remedy = f"Use tensors and immutable values, in tuples, lists or dicts, {_ELSEWHERE}"
    if type(found).__name__.endswith("Cache") and (switch := cache_switch(model)) is not None:
        remedy = f"Use {switch}."
    return CannotCut(reason, remedy=remedy)


def contents_outside(model: nn.Module, units: Sequence[Block]) -> ObjectSnapshot:
    """Return the state of the modules whose code runs between blocks, and therefore only during tracing."""
    inside = {id(module) for unit in units for entry in unit.entries for module in entry.modules()}
    return ObjectSnapshot((name, one) for name, one in model.named_modules() if id(one) not in inside)
