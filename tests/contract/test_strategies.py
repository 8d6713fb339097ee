"""Every strategy of conf/strategy against the oracle: the same numbers, wherever the shards are computed.

A strategy that weighs shards alike, drops a short batch or reads samples in another order is caught here alone.
"""

from dataclasses import replace

import pytest

from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.stepping import STRATEGIES, Case, oracle, takes_replicas, train
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
    if num_ranks(name, count) <= (2 if name in ("multi_worker_mirrored", "tensor_parallel") else 4)
]


def test_strategies_are_tried_on_one_two_and_four_replicas() -> None:
    assert {("mirrored", 4), ("fsdp", 4), ("pipeline", 2), ("multi_worker_mirrored", 2)} <= {*PLACES}


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
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize("task", ["unlabelled", "masks", "soft_masks"])
@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_ignored_weighted_smoothed_and_soft_classes_are_those_of_torch(
    strategy: str, replicas: int, task: str, pool: Pool
) -> None:
    case = placed(Case(task=task, global_size=16, micro_size=3), strategy, replicas)  # some shards have no target
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize(("strategy", "replicas"), PLACES)
def test_clipped_steps_use_each_sample_once_and_weigh_batch_statistics_by_samples(
    strategy: str, replicas: int, pool: Pool
) -> None:
    base = replace(CLASSES, micro_size=3, num_steps=9, max_norm=0.05, model={"norm": True})  # 3, 3, 3, 3, 2 and 2
    case = placed(base, strategy, replicas)
    ranks = assert_reference(train(pool, case), case)
    assert min(ranks[0].norms) > 0.05
    assert ranks[0].weights["1.num_batches_tracked"] == 9
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
    assert_reference(train(pool, replace(case, resume_at=4)), case)


@pytest.mark.parametrize("micro_size", [3, 5])
@pytest.mark.slow
def test_reproducible_runs_end_in_the_same_bits_on_any_number_of_replicas(micro_size: int, pool: Pool) -> None:
    model = {"norm": True, "dropout": 0.3}
    base = Case(precision="fp32", optimizer="adamw", reproducible=True, model=model, global_size=20, max_norm=0.5)
    base = replace(base, micro_size=micro_size)
    expected = alone(base)
    for count in (1, 2, 3, 4):
        assert_bits(train(pool, placed(base, "mirrored", count)), expected)


@pytest.mark.parametrize("task", ["unlabelled", "masks"])
@pytest.mark.slow
def test_counted_targets_keep_the_bits_of_a_reproducible_run(task: str, pool: Pool) -> None:
    base = Case(precision="fp32", reproducible=True, task=task, global_size=16, micro_size=3)
    assert_bits(train(pool, placed(base, "mirrored", 3)), alone(base))


def test_dropout_is_the_same_on_any_number_of_replicas(pool: Pool) -> None:
    base = replace(CLASSES, micro_size=3, model={"dropout": 0.5})
    assert_close(train(pool, placed(base, "mirrored", 4)), alone(base))
