"""The order of samples and the cut of batches."""

from typing import Any

import numpy as np
import pytest

from trainkit.numerics.batch import BatchPlan, BatchSizes, SampleOrder, lane_order, resolve_batch, shards_of_rank
from trainkit.numerics.generators import mix64, mix64_array


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 17, 1437, 4097])
def test_an_epoch_uses_every_sample_once(num_samples: int) -> None:
    order = SampleOrder(num_samples=num_samples, seed=7)
    assert sorted(order.indices(3, 0, num_samples).tolist()) == list(range(num_samples))


def test_any_stretch_of_an_epoch_is_computed_alone() -> None:
    order = SampleOrder(num_samples=1000, seed=1)
    whole = order.indices(2, 0, 1000)
    assert order.indices(2, 617, 700).tolist() == whole[617:700].tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = SampleOrder(num_samples=100, seed=0)
    other = SampleOrder(num_samples=100, seed=1)
    assert first.indices(0, 0, 100).tolist() != first.indices(1, 0, 100).tolist()
    assert first.indices(0, 0, 100).tolist() != other.indices(0, 0, 100).tolist()


def test_the_order_of_a_huge_dataset_needs_no_memory_for_it() -> None:
    found = SampleOrder(num_samples=10**12, seed=0).indices(5, 10**11, 10**11 + 4)
    assert len(set(found.tolist())) == 4
    assert found.max() < 10**12


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


def test_the_last_short_batch_is_trained_on() -> None:
    plan = BatchPlan(num_samples=10, global_size=4, micro_size=4)
    assert [plan.batch_range(step) for step in range(4)] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    assert [plan.samples_before(step) for step in range(5)] == [0, 4, 8, 10, 14]


def test_the_last_short_batch_is_left_out_where_asked() -> None:
    plan = BatchPlan(num_samples=10, global_size=4, micro_size=4, drop_last=True)
    assert [plan.batch_range(step) for step in range(3)] == [(0, 0, 4), (0, 4, 8), (1, 0, 4)]
    assert plan.samples_before(3) == 12


@pytest.mark.parametrize("lanes", [None, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_shards", [1, 3, 8, 12, 29])
def test_every_shard_has_one_rank(num_shards: int, num_ranks: int, lanes: int | None) -> None:
    ranks = [shards_of_rank(num_shards, rank=r, num_ranks=num_ranks, lanes=lanes) for r in range(num_ranks)]
    assert sorted(shard for shards in ranks for shard in shards) == list(range(num_shards))


def test_lanes_are_visited_from_left_to_right_of_the_tree() -> None:
    assert list(lane_order(8)) == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize(
    ("given", "replicas", "lanes", "expected"),
    [
        ({"global_size": 100}, 3, None, BatchSizes(100, 34)),
        ({"global_size": 100}, 3, 8, BatchSizes(100, 13)),
        ({"global_size": 5}, 1, 8, BatchSizes(5, 1)),
        ({"global_size": 100, "micro_size": 10}, 4, None, BatchSizes(100, 10)),
        ({"global_size": 96, "accumulation": 3}, 4, None, BatchSizes(96, 8)),
        ({"micro_size": 8, "accumulation": 3}, 4, None, BatchSizes(96, 8)),
    ],
)
def test_two_of_three_sizes_give_the_third(
    given: dict[str, int], replicas: int, lanes: int | None, expected: BatchSizes
) -> None:
    sizes: dict[str, Any] = {"global_size": None, "micro_size": None, "accumulation": None, **given}
    assert resolve_batch(**sizes, num_replicas=replicas, lanes=lanes) == expected


@pytest.mark.parametrize(("global_size", "micro_size"), [(64, 4), (5, 1)])
def test_a_replica_that_needs_several_shards_to_be_busy_gets_them_where_the_batch_is_large_enough(
    global_size: int, micro_size: int
) -> None:
    sizes: dict[str, Any] = {"global_size": global_size, "micro_size": None, "accumulation": None}
    found = resolve_batch(**sizes, num_replicas=2, lanes=None, shards_a_replica=8)
    assert found == BatchSizes(global_size=global_size, micro_size=micro_size)


def test_fewer_shards_than_replicas_is_a_problem_with_the_size_that_occupies_all() -> None:
    found = resolve_batch(global_size=100, micro_size=50, accumulation=None, num_replicas=4, lanes=None)
    assert isinstance(found, list)
    (problem,) = found
    assert str(problem) == (
        "batch.micro_size=50: cuts a step of 100 samples into 2 shards, fewer than the 4 replicas. "
        "Use batch.micro_size=25, which occupies all."
    )


def test_a_micro_size_beyond_the_batch_is_a_problem() -> None:
    found = resolve_batch(global_size=100, micro_size=128, accumulation=None, num_replicas=1, lanes=None)
    assert isinstance(found, list)
    assert [str(problem) for problem in found] == [
        "batch.micro_size=128: larger than batch.global_size=100. Use 100 or less."
    ]


def test_a_short_stretch_and_a_long_one_agree() -> None:
    order = SampleOrder(num_samples=5000, seed=4)
    assert order.indices(1, 0, 5000)[1000:1010].tolist() == order.indices(1, 1000, 1010).tolist()
