"""A sample that a stretch of an epoch reads twice or a cut of a batch leaves out is caught here alone.

Partial sums of lanes that stay alive until a garbage collection are caught here alone.

So are constants on a GPU that another dtype or a traced pass has left there.
"""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.errors import Problem
from trainkit.numerics import copies
from trainkit.numerics.batch import (
    BatchPlan,
    BatchSizes,
    LaneNode,
    LaneSums,
    SampleOrder,
    lane_order,
    resolve_batch,
    shards_of_rank,
)
from trainkit.numerics.copies import constant_on
from trainkit.numerics.generators import mix64, mix64_array


def test_an_epoch_uses_every_sample_once_in_an_order_of_its_own() -> None:
    for num_samples in (1, 2, 3, 4, 5, 17, 1437, 4097):
        order = SampleOrder(num_samples=num_samples, seed=7)
        assert sorted(order.indices(3, 0, num_samples).tolist()) == list(range(num_samples))
    first, other = SampleOrder(num_samples=100, seed=0), SampleOrder(num_samples=100, seed=1)
    assert first.indices(0, 0, 100).tolist() != first.indices(1, 0, 100).tolist()
    assert first.indices(0, 0, 100).tolist() != other.indices(0, 0, 100).tolist()


def test_any_stretch_of_an_epoch_is_computed_alone() -> None:
    order = SampleOrder(num_samples=5000, seed=1)
    whole = order.indices(2, 0, 5000)
    for first, last in ((617, 700), (1000, 1010), (30, 4000)):  # short and long ones are computed in two ways
        assert order.indices(2, first, last).tolist() == whole[first:last].tolist()


def test_the_order_of_a_huge_dataset_needs_no_memory_for_it() -> None:
    indices = SampleOrder(num_samples=10**12, seed=0).indices(5, 10**11, 10**11 + 4)
    assert len(set(indices.tolist())) == 4
    assert indices.max() < 10**12


def test_without_shuffle_samples_come_as_they_stand() -> None:
    assert SampleOrder(num_samples=9, seed=0, shuffle=False).indices(4, 2, 5).tolist() == [2, 3, 4]


def test_the_order_looks_random_in_every_position() -> None:
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), SampleOrder(num_samples=8, seed=0).indices(epoch, 0, 8)] += 1
    assert abs(counts - 500).max() < 110  # five standard deviations of a binomial with n=4000, p=1/8


def test_the_hash_of_arrays_is_the_hash_of_numbers() -> None:
    values = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert mix64_array(values).tolist() == [mix64(int(value)) for value in values]


def test_a_batch_is_cut_into_nearly_equal_shards_without_a_remainder_of_one() -> None:
    plan = BatchPlan(num_samples=33, global_size=33, micro_size=32)
    assert [plan.shard_range(0, shard) for shard in range(2)] == [(0, 0, 17), (0, 17, 33)]


def test_the_last_short_batch_is_trained_on_or_left_out() -> None:
    plan = BatchPlan(num_samples=10, global_size=4, micro_size=4)
    assert [plan.batch_range(step) for step in range(4)] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    assert [plan.samples_before(step) for step in range(5)] == [0, 4, 8, 10, 14]
    plan = BatchPlan(num_samples=10, global_size=4, micro_size=4, drop_last=True)
    assert [plan.batch_range(step) for step in range(3)] == [(0, 0, 4), (0, 4, 8), (1, 0, 4)]
    assert plan.samples_before(3) == 12


def test_every_shard_has_one_rank() -> None:
    for lanes, num_ranks, num_shards in product((None, 8), (1, 2, 3, 4, 7), (1, 3, 8, 12, 29)):
        ranks = [shards_of_rank(num_shards, rank=r, num_ranks=num_ranks, lanes=lanes) for r in range(num_ranks)]
        assert sorted(shard for shards in ranks for shard in shards) == list(range(num_shards))


def test_lanes_are_visited_from_left_to_right_of_the_tree() -> None:
    assert list(lane_order(8)) == [0, 4, 2, 6, 1, 5, 3, 7]


def sizes_of(values: dict[str, int], replicas: int, **more: Any) -> BatchSizes | list[Problem]:
    sizes: dict[str, Any] = {"global_size": None, "micro_size": None, "accumulation": None, "lanes": None}
    return resolve_batch(**{**sizes, **values, **more}, num_replicas=replicas)


@pytest.mark.parametrize(("values", "replicas", "more", "expected"), [
    ({"global_size": 100}, 3, {}, BatchSizes(100, 34)),
    ({"global_size": 100}, 3, {"lanes": 8}, BatchSizes(100, 13)),
    ({"global_size": 5}, 1, {"lanes": 8}, BatchSizes(5, 1)),
    ({"global_size": 100, "micro_size": 10}, 4, {}, BatchSizes(100, 10)),
    ({"global_size": 96, "accumulation": 3}, 4, {}, BatchSizes(96, 8)),
    ({"micro_size": 8, "accumulation": 3}, 4, {}, BatchSizes(96, 8)),
    # a replica that needs several shards to be busy gets them where the batch is large enough
    ({"global_size": 64}, 2, {"shards_a_replica": 8}, BatchSizes(64, 4)),
    ({"global_size": 5}, 2, {"shards_a_replica": 8}, BatchSizes(5, 1)),
])  # fmt: skip
def test_two_of_three_sizes_give_the_third(
    values: dict[str, int], replicas: int, more: dict[str, int], expected: BatchSizes
) -> None:
    assert sizes_of(values, replicas, **more) == expected


def test_sizes_that_leave_replicas_idle_or_exceed_the_batch_are_problems() -> None:
    for micro_size, replicas, word in (
        (50, 4, "Use batch.micro_size=25"),
        (128, 1, "larger than batch.global_size=100"),
    ):
        problems = sizes_of({"global_size": 100, "micro_size": micro_size}, replicas)
        assert isinstance(problems, list)
        assert [str(p).startswith(f"batch.micro_size={micro_size}: ") and word in str(p) for p in problems] == [True]


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
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_gpu_gets_a_constant_once_and_a_tensor_without_data_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_CONSTANTS", {})
    monkeypatch.setattr(copies, "sent_to", lambda _device, tensor: tensor)
    arguments = [1.0, 2.0], torch.float64, torch.device("cuda", 0)
    with FakeTensorMode():
        constant_on(*arguments)
    first = constant_on(*arguments)
    assert (first.tolist(), first.dtype) == ([1.0, 2.0], torch.float64)
    assert constant_on(*arguments) is first
    assert constant_on(arguments[0], torch.float32, arguments[2]).dtype is torch.float32
