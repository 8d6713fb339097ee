"""Tensors on the meta device that report the CPU as their device to a constructor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["fake_cpu_device", "without_numbers"]

_DEVICE: Any = torch._C.TensorBase.device  # noqa: SLF001 - the property that is hidden inside `fake_cpu_device`


def without_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor is really on the meta device, whatever it reports."""
    return bool(_DEVICE.__get__(tensor).type == "meta")


@contextmanager
def fake_cpu_device(fakes_cpu: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let tensors of the meta device for which `fakes_cpu` holds report the CPU inside of the block.

    `nn.init` skips tensors on the meta device (`trunc_normal_`, `orthogonal_`), and a constructor may do the same; then
    no operation would be recorded, and the values would differ. Torch's own modules still see the real device, which
    they use to allocate.

    Args:
        fakes_cpu: whether a tensor of the meta device reports the CPU.
    """

    def is_meta(tensor: Tensor) -> bool:
        return without_numbers(tensor) and not fakes_cpu(tensor)

    def device(tensor: Tensor) -> torch.device:
        found: torch.device = _DEVICE.__get__(tensor)
        if found.type != "meta" or not fakes_cpu(tensor):
            return found
        asking = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - has no public name
        return found if asking == "torch" or asking.startswith("torch.") else torch.device("cpu")

    Tensor.is_meta, Tensor.device = property(is_meta), property(device)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.is_meta, Tensor.device
