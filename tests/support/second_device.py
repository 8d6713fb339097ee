"""A second device on a machine that has one: tensors with numbers that call themselves `meta`.

Inside `SecondDevice`, what is moved to the meta device keeps its numbers, computes on them, and refuses to compute with
a tensor of the CPU, as two GPUs do. Backward passes and in-place updates work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.strategies.maps import layout as placing
from trainkit.strategies.maps.layout import DeviceLayout, ModelMap

META = torch.device("meta")


class There(torch.Tensor):
    """A tensor on the second device."""

    here: Tensor

    @staticmethod
    def __new__(cls: type[Self], here: Tensor) -> Self:
        there: Self = torch.Tensor._make_wrapper_subclass(cls, here.shape, here.stride(), dtype=here.dtype, device=META)
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as an instance's
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        return _call(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, the meta device is the second device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.crossed: list[torch.dtype] = []
        """The dtype of each tensor that went from one device to the other, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = _call(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        ends = {"_to_copy": (args[:1], found), "copy_": (args[:1], args[1:2]), "_foreach_copy_": args[:2]}.get(name)
        for one, other in zip(*map(tree_leaves, ends), strict=True) if ends else ():
            if isinstance(one, There) != isinstance(other, There):
                self.crossed.append(one.dtype)
        return found


def send(module: nn.Module) -> None:
    """Put a module's parameters there, as new ones; buffers too."""
    for name, param in module._parameters.items():
        if param is not None:
            module._parameters[name] = nn.Parameter(There(param.detach().clone()), requires_grad=param.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = There(buffer)
    for child in module.children():
        send(child)


def fetch(tensor: Tensor) -> Tensor:
    """A tensor's numbers, on the CPU."""
    tensor = tensor.detach()
    return tensor.here if isinstance(tensor, There) else tensor


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    name = func.overloadpacket.__name__
    known = {id(leaf.here): leaf for leaf in leaves if isinstance(leaf, There)}
    given = kwargs.get("device")
    there = any(isinstance(leaf, There) for leaf in leaves) if given is None else torch.device(given) == META
    if name not in ("_to_copy", "copy_") and there:
        _refuse_strangers(name, args, leaves)
    plain = tree_map(lambda leaf: leaf.here if isinstance(leaf, There) else leaf, (args, dict(kwargs)))
    if given is not None:
        plain[1]["device"] = torch.device("cpu")
    found = func(*plain[0], **plain[1])
    if name.startswith("_foreach"):
        if found is None:
            return None
        first = args[0]
        return [There(one) if isinstance(like, There) else one for one, like in zip(found, first, strict=True)]
    if name == "copy_":
        return args[0]
    return tree_map(lambda one: known[id(one)] if id(one) in known else _wrapped(one, there=there), found)


def _refuse_strangers(name: str, args: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    """Lists of a foreach function may be of several devices, a number for all of them may not be of another."""
    shared = [one for one in args if isinstance(one, Tensor)]
    judged = leaves if not name.startswith("_foreach") or shared else []
    assert len({isinstance(one, There) for one in judged}) < 2, f"{name} got tensors of two devices"


def _wrapped(found: Any, *, there: bool) -> Any:
    return There(found) if there and isinstance(found, Tensor) else found


@contextmanager
def two_devices(*, alone: bool = False) -> Iterator[None]:
    """The first place of every map is a second device, and fused kernels run there too.

    Args:
        alone: whether the map has one place, whose first block gets the second device.
    """

    def on_two(self: ModelMap, *args: Any, **kwargs: Any) -> Any:
        found = whole(self, *args, **kwargs)
        if alone:
            rest = (None if place is None else 1 for place in found.places[1:])
            return replace(found, group=("meta", "cpu"), places=(0, *rest))
        return replace(found, group=("meta", "cpu")) if isinstance(found, DeviceLayout) else found

    def move(owner: nn.Module, device: torch.device, only: str | None) -> None:
        del only
        if device.type == "meta":
            send(owner)

    whole = ModelMap.layout
    first, second = (
        mock.patch.object(import_module(f"torch.optim.{name}"), "_device_dtype_check_for_fused")
        for name in ("sgd", "adam")
    )  # know by name where their fused kernels run
    laid, moved = mock.patch.object(ModelMap, "layout", on_two), mock.patch.object(placing, "_move", move)
    with laid, moved, first, second, SecondDevice():
        yield
