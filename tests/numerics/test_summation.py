"""Partial sums of lanes that stay alive until a garbage collection are caught here alone.

So are constants on a GPU that another dtype or a traced pass has left there.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.numerics import copies
from trainkit.numerics.batch import LaneNode, LaneSums
from trainkit.numerics.copies import constant_on


def test_the_sums_of_a_step_are_freed_without_a_garbage_collection() -> None:
    sums, alive = LaneSums(torch.add, num_lanes=4, num_shards=4), list[weakref.ref[torch.Tensor]]()
    gc.disable()
    try:
        for lane in (0, 2, 1, 3):
            part = torch.full((2,), float(lane))
            alive.append(weakref.ref(part))
            sums.push(LaneNode(lane, 4), part)
        del part
        assert [total.tolist() for total in sums.take()] == [[6.0, 6.0]]
        assert [one() for one in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_gpu_gets_a_constant_once_and_a_tensor_without_data_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_CONSTANTS", {})
    monkeypatch.setattr(copies, "sent_to", lambda _device, tensor: tensor)
    wanted = [1.0, 2.0], torch.float64, torch.device("cuda", 0)
    with FakeTensorMode():
        constant_on(*wanted)
    first = constant_on(*wanted)
    assert (first.tolist(), first.dtype) == ([1.0, 2.0], torch.float64)
    assert constant_on(*wanted) is first
    assert constant_on(wanted[0], torch.float32, wanted[2]).dtype is torch.float32
