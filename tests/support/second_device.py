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


class Remote(torch.Tensor):
    """A tensor on the second device."""

    host: Tensor

    @staticmethod
    def __new__(cls: type[Self], host: Tensor) -> Self:
        leaf: Self = torch.Tensor._make_wrapper_subclass(cls, host.shape, host.stride(), dtype=host.dtype, device=META)
        leaf.host = host
        return leaf

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
        result = _call(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        ends = {"_to_copy": (args[:1], result), "copy_": (args[:1], args[1:2]), "_foreach_copy_": args[:2]}.get(name)
        for first, second in zip(*map(tree_leaves, ends), strict=True) if ends else ():
            if isinstance(first, Remote) != isinstance(second, Remote):
                self.crossed.append(first.dtype)
        return result


def send(module: nn.Module) -> None:
    """Put a module's parameters there, as new ones; buffers too."""
    for name, param in module._parameters.items():
        if param is not None:
            module._parameters[name] = nn.Parameter(Remote(param.detach().clone()), requires_grad=param.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = Remote(buffer)
    for child in module.children():
        send(child)


def fetch(tensor: Tensor) -> Tensor:
    """A tensor's numbers, on the CPU."""
    tensor = tensor.detach()
    return tensor.host if isinstance(tensor, Remote) else tensor


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    name = func.overloadpacket.__name__
    remote = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, Remote)}
    device = kwargs.get("device")
    on_second = bool(remote) if device is None else torch.device(device) == META
    if name not in ("_to_copy", "copy_") and on_second:
        _refuse_strangers(name, args, leaves)
    plain = tree_map(lambda leaf: leaf.host if isinstance(leaf, Remote) else leaf, (args, dict(kwargs)))
    if device is not None:
        plain[1]["device"] = torch.device("cpu")
    result = func(*plain[0], **plain[1])
    if name.startswith("_foreach"):
        if result is None:
            return None
        return [Remote(leaf) if isinstance(like, Remote) else leaf for leaf, like in zip(result, args[0], strict=True)]
    if name == "copy_":
        return args[0]

    def wrapped(leaf: Any) -> Any:
        if id(leaf) in remote:
            return remote[id(leaf)]
        return Remote(leaf) if on_second and isinstance(leaf, Tensor) else leaf

    return tree_map(wrapped, result)


def _refuse_strangers(name: str, args: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    """Lists of a foreach function may be of several devices, a number for all of them may not be of another."""
    shared = [arg for arg in args if isinstance(arg, Tensor)]
    judged = leaves if not name.startswith("_foreach") or shared else []
    assert len({isinstance(tensor, Remote) for tensor in judged}) < 2, f"{name} got tensors of two devices"


@contextmanager
def two_devices(*, alone: bool = False) -> Iterator[None]:
    """The first place of every map is a second device, and fused kernels run there too.

    Args:
        alone: whether the map has one place, whose first block gets the second device.
    """

    def on_two(self: ModelMap, *args: Any, **kwargs: Any) -> Any:
        layout = plain(self, *args, **kwargs)
        if alone:
            others = (None if index is None else 1 for index in layout.places[1:])
            return replace(layout, group=("meta", "cpu"), places=(0, *others))
        return replace(layout, group=("meta", "cpu")) if isinstance(layout, DeviceLayout) else layout

    def move(owner: nn.Module, device: torch.device, only: str | None) -> None:
        del only
        if device.type == "meta":
            send(owner)

    plain = ModelMap.layout
    first, second = (
        mock.patch.object(import_module(f"torch.optim.{name}"), "_device_dtype_check_for_fused")
        for name in ("sgd", "adam")
    )  # know by name where their fused kernels run
    laid, moved = mock.patch.object(ModelMap, "layout", on_two), mock.patch.object(placing, "_move", move)
    with laid, moved, first, second, SecondDevice():
        yield
