"""Every strategy of conf/strategy against the oracle: the same numbers, wherever the shards are computed.

A strategy that weighs shards alike, drops a short batch or reads samples in another order is caught here alone.
"""

from dataclasses import replace

import pytest
import torch

from tests.contract.stepping import STRATEGIES, Case, oracle, takes_replicas, train
from tests.support import reference
from tests.support.pool import Pool
from trainkit.strategies.base import PlanContext

pytestmark = pytest.mark.pairwise


def placed(case: Case, strategy: str, replicas: int) -> Case:
    settings = {"replicas": replicas} if takes_replicas(strategy) else {}
    # as on GPUs; processes of a CPU reduce in shared memory by default
    reducer = {"reduce": "backend"} if strategy == "multi_worker_mirrored" else {}
    return replace(case, strategy=strategy, settings=settings | reducer)


def num_ranks(strategy: str, replicas: int) -> int:
    return len(placed(Case(), strategy, replicas).make_strategy().tasks(PlanContext()))


PLACES = [
    (name, count)
    for name in STRATEGIES
    for count in ((1, 2, 4) if takes_replicas(name) else (1,))
    if num_ranks(name, count) <= 4
]

# 37 points in batches of 16 and 5; 29 sequences in batches of 8 and 5: the last batch of an epoch is short
CLASSES = Case(task="classes", global_size=16, micro_size=16)
TOKENS = Case(task="tokens", global_size=8, micro_size=8)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_six_steps_are_those_of_the_reference(
    base: Case, strategy: str, replicas: int, optimizer: str, accumulation: int, pool: Pool
) -> None:
    micro_size = -(-base.global_size // (replicas * accumulation))
    case = placed(replace(base, optimizer=optimizer, micro_size=micro_size), strategy, replicas)
    ranks, expected = train(pool, case), oracle(case)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize("task", ["unlabelled", "masks", "soft_masks"])
@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_ignored_weighted_smoothed_and_soft_classes_are_those_of_torch(
    strategy: str, replicas: int, task: str, pool: Pool
) -> None:
    case = placed(Case(task=task, global_size=16, micro_size=3), strategy, replicas)  # some shards have no target
    ranks, expected = train(pool, case), oracle(case)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_a_clipped_step_is_that_of_the_reference(strategy: str, replicas: int, pool: Pool) -> None:
    case = placed(replace(CLASSES, micro_size=3, max_norm=0.05), strategy, replicas)
    ranks, expected = train(pool, case), oracle(case)
    assert min(ranks[0].norms) > 0.05
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.norms == ranks[0].norms


@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_batch_statistics_are_weighted_by_samples_and_move_once_a_step(
    strategy: str, replicas: int, pool: Pool
) -> None:
    case = placed(replace(CLASSES, micro_size=6, model={"norm": True}), strategy, replicas)  # 6, 5 and 5
    expected = oracle(case)
    assert expected.model.state_dict()["1.num_batches_tracked"] == 6
    for rank in train(pool, case):
        assert reference.differences(rank.weights, expected) == []


@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_every_sample_is_used_once_an_epoch_in_the_order_of_the_reference(
    strategy: str, replicas: int, pool: Pool
) -> None:
    case = placed(replace(CLASSES, micro_size=3, num_steps=9), strategy, replicas)
    ranks = train(pool, case)
    for step, expected in enumerate(oracle(case).samples):
        assert sorted(index for rank in ranks for index in rank.samples[step]) == sorted(expected)
    for epoch in range(3):
        used = [i for rank in ranks for step in rank.samples[3 * epoch : 3 * epoch + 3] for i in step]
        assert sorted(used) == list(range(37))


# not AdamW with BatchNorm: the bias before it has no gradient, AdamW makes steps of its rounding, the running mean sees
@pytest.mark.parametrize(("optimizer", "norm"), [("adamw", False), ("sgd", True)])
@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_a_training_continued_in_the_middle_of_an_epoch_is_the_same_training(
    strategy: str, replicas: int, optimizer: str, norm: bool, pool: Pool
) -> None:
    case = placed(replace(CLASSES, micro_size=4, optimizer=optimizer, model={"norm": norm}), strategy, replicas)
    ranks, expected = train(pool, replace(case, resume_at=4)), oracle(case)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []


@pytest.mark.parametrize("micro_size", [3, 5])
@pytest.mark.slow
def test_reproducible_runs_end_in_the_same_bits_on_any_number_of_replicas(micro_size: int, pool: Pool) -> None:
    base = Case(
        precision="fp32",
        optimizer="adamw",
        reproducible=True,
        global_size=20,
        micro_size=micro_size,
        model={"norm": True, "dropout": 0.3},
        max_norm=0.5,
    )
    expected = train(pool, base)[0].state
    for count in (1, 2, 3, 4):
        for rank in train(pool, placed(base, "mirrored", count)):
            unequal = [key for key, tensor in expected.items() if not torch.equal(tensor, rank.state[key])]
            assert (count, unequal) == (count, [])


@pytest.mark.parametrize("task", ["unlabelled", "masks"])
@pytest.mark.slow
def test_counted_targets_keep_the_bits_of_a_reproducible_run(task: str, pool: Pool) -> None:
    base = Case(precision="fp32", reproducible=True, task=task, global_size=16, micro_size=3)
    expected = train(pool, base)[0].state
    for rank in train(pool, placed(base, "mirrored", 3)):
        assert [key for key, tensor in expected.items() if not torch.equal(tensor, rank.state[key])] == []


def test_dropout_is_the_same_on_any_number_of_replicas(pool: Pool) -> None:
    base = replace(CLASSES, micro_size=3, model={"dropout": 0.5})
    expected = train(pool, base)[0].weights
    for rank in train(pool, placed(base, "mirrored", 4)):
        for name, tensor in expected.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-12, atol=1e-14)


def test_replicas_without_a_shard_in_a_short_batch_take_part(pool: Pool) -> None:
    # the last batch of an epoch has 5 of 8 samples: on 4 replicas with shards of 3, two have none
    case = placed(replace(CLASSES, micro_size=3, global_size=16, num_steps=3), "mirrored", 4)
    assert [len(rank.samples[2]) for rank in train(pool, case)] == [3, 2, 0, 0]
