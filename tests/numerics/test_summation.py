"""Partial sums of lanes that stay alive until a garbage collection are caught here alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch

from trainkit.numerics.summation import LaneNode, combine_pairwise


def test_the_sums_of_a_step_are_freed_without_a_garbage_collection() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def leaves() -> Iterator[tuple[LaneNode, torch.Tensor]]:
        for lane in (0, 2, 1, 3):
            found = torch.full((2,), float(lane))
            alive.append(weakref.ref(found))
            yield LaneNode(lane, 4), found

    gc.disable()
    try:
        total = combine_pairwise(leaves(), torch.add, num_lanes=4)
        assert total.tolist() == [6.0, 6.0]
        assert [one() for one in alive] == [None] * 4
    finally:
        gc.enable()
