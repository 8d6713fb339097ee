"""Local SGD against replicas trained apart by hand, and against one device where every step is averaged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contract.stepping import Case, oracle, run_rank, train
from tests.support import apart, reference, zoo
from tests.support.pool import Place, Pool

# 37 points in batches of 16 and 5; 29 sequences in batches of 8 and 5, with unequal numbers of targets
CLASSES = Case(task="classes", global_size=16, micro_size=4)
TOKENS = Case(task="tokens", global_size=8, micro_size=2)


def local(case: Case, replicas: int, **settings: Any) -> Case:
    return replace(case, strategy="local_sgd", settings={"replicas": replicas, **settings})


def by_hand(case: Case, averaging: apart.Averaging) -> dict[str, torch.Tensor]:
    data = case.make_data()
    model = apart.train(
        case.make_model(),
        [data[index] for index in range(len(data))],
        zoo.classes_sum if case.task == "classes" else zoo.tokens_sum,
        averaging,
        optimizer=reference.sgd(momentum=0.9) if case.optimizer == "sgd" else reference.adamw(weight_decay=0.1),
        rate=case.rate,
        num_steps=case.num_steps,
        global_size=case.global_size,
        micro_size=case.micro_size,
        seed=case.seed,
    )
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    "base", [CLASSES, replace(CLASSES, model={"norm": True}), TOKENS], ids=["classes", "norm", "tokens"]
)
def test_averaging_every_step_is_the_training_of_one_device_under_sgd(base: Case, replicas: int, pool: Pool) -> None:
    expected = oracle(base)
    for rank in train(pool, local(base, replicas, average_every=1)):
        assert reference.differences(rank.weights, expected) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("outer", [None, 0.7])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_trained_apart_are_those_trained_by_hand(
    replicas: int, outer: float | None, optimizer: str, pool: Pool
) -> None:
    # not AdamW with BatchNorm: the bias before it has no gradient, and AdamW makes steps of its rounding
    case = replace(CLASSES, micro_size=-(-16 // replicas), num_steps=9, optimizer=optimizer)
    case = replace(case, model={"norm": optimizer == "sgd"})
    expected = by_hand(case, apart.Averaging(replicas=replicas, every=3, lr=outer))
    for rank in train(pool, local(case, replicas, average_every=3, outer={"lr": outer})):
        for name, tensor in expected.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-12, atol=1e-13)


def test_the_first_steps_may_be_those_of_one_device(pool: Pool) -> None:
    case = replace(CLASSES, optimizer="adamw", num_steps=4)
    expected = oracle(case)
    for rank in train(pool, local(case, 2, local_after=4)):
        assert reference.differences(rank.weights, expected) == []
    apart_since = train(pool, local(replace(case, num_steps=6), 2, local_after=4, average_every=2))
    assert reference.differences(apart_since[0].weights, oracle(replace(case, num_steps=6))) != []


def exchanges(place: Place, case: Case) -> list[int]:
    """How often the ranks have met after each step."""
    met, plain = [], dist.all_reduce
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    try:
        for steps in range(1, case.num_steps + 1):
            count = 0
            run_rank(replace(place, prefix=f"{place.prefix}/{steps}"), replace(case, num_steps=steps))
            met.append(count)
    finally:
        dist.all_reduce = plain
    return met


def test_replicas_meet_once_every_k_steps(pool: Pool) -> None:
    case = local(replace(CLASSES, optimizer="adamw", model={"norm": True}, num_steps=7), 2, average_every=3)
    assert pool.run("tests.contract.test_local_sgd.exchanges", case, num_ranks=2) == [[0, 0, 1, 1, 1, 2, 2]] * 2


def test_a_training_continued_at_an_average_ends_in_the_same_bits(pool: Pool) -> None:
    case = local(replace(CLASSES, optimizer="adamw", num_steps=9), 2, average_every=3, outer={"lr": 0.7})
    whole = train(pool, case)[0].state
    for rank in train(pool, replace(case, resume_at=6)):
        unequal = [name for name, tensor in whole.items() if not torch.equal(tensor, rank.state[name])]
        assert (rank.state.keys() - whole.keys(), unequal) == (set(), [])
    assert "optimizer/outer_momentum/0.weight" in whole
