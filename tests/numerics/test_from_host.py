"""Numbers of the host are copied to a device without a wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.numerics import from_host
from trainkit.numerics.from_host import constant_on, tensor_on


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


def test_a_gpu_gets_a_constant_once_and_a_tensor_without_data_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_host, "_CONSTANTS", {})
    monkeypatch.setattr(from_host, "tensor_on", lambda numbers, dtype, _: torch.tensor(numbers, dtype=dtype))
    wanted = [1.0, 2.0], torch.float64, torch.device("cuda", 0)
    with FakeTensorMode():
        constant_on(*wanted)
    first = constant_on(*wanted)
    assert (first.tolist(), first.dtype) == ([1.0, 2.0], torch.float64)
    assert constant_on(*wanted) is first
    assert constant_on(wanted[0], torch.float32, wanted[2]).dtype is torch.float32
