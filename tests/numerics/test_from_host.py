"""Numbers of the host are copied to a device without a wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.numerics.from_host import tensor_on


class Pinned:
    """Stands for a tensor in pinned memory."""

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        assert non_blocking
        return f"on {device}"


def test_a_gpu_copies_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(numbers: Any, *, dtype: torch.dtype, pin_memory: bool) -> Pinned:
        assert (numbers, dtype, pin_memory) == ([1.0], torch.float32, True)
        return Pinned()

    monkeypatch.setattr(torch, "tensor", made)
    assert tensor_on([1.0], torch.float32, torch.device("cuda", 1)) == "on cuda:1"
