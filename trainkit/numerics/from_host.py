"""Copy numbers from the host to a device without synchronisation.

`tensor.to("cuda")` and `torch.tensor(..., device="cuda")` copy from pageable memory, for which the host waits;
page-locked memory is copied in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor


def tensor_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numbers,) a tensor on a device.

    Example:
        >>> tensor_on([0.5, 2.0], torch.float64, torch.device("cpu"))
        tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the host on a device.

    Example:
        >>> sent_to(torch.device("cpu"), torch.arange(3))
        tensor([0, 1, 2])
    """
    return tensor.to(device) if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)


def constant_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numbers,) a tensor on a device, which the caller must not change; an accelerator gets it once.

    A compiled graph would hold the numbers as a tensor of the host, and copy it from pageable memory in each run.

    Example:
        >>> constant_on([0.5, 2.0], torch.float32, torch.device("cpu"))
        tensor([0.5000, 2.0000])
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    key = tuple(numbers), dtype, device
    found = _CONSTANTS.get(key)
    if found is None:
        found = tensor_on(numbers, dtype, device)
        if type(found) is Tensor:  # and not one without data
            _CONSTANTS[key] = found
    return found


_CONSTANTS: Final[dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor]] = {}
