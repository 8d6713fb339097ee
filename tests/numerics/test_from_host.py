"""A constant on a GPU that another dtype or a traced pass has left there is caught here alone."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.numerics import from_host
from trainkit.numerics.from_host import constant_on


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
