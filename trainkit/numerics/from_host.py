"""Copy a few numbers from the host to a device without synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tensor_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numbers,) a tensor on a device.

    `torch.tensor(..., device="cuda")` copies from pageable memory, for which the host waits; pinned memory is copied in
    the order of the stream.

    Example:
        >>> tensor_on([0.5, 2.0], torch.float64, torch.device("cpu"))
        tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
