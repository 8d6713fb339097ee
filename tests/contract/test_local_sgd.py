"""Local SGD against replicas trained apart by hand, and against one device where every step is averaged.

Replicas that are averaged a step too early, or without their momentum is caught here alone.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.crossing import cross
from tests.contract.running import run
from tests.contract.stepping import Case, arguments_of, oracle, run_rank, train
from tests.contract.test_updates import Words
from tests.support import apart, reference, zoo
from tests.support.pool import Member, Pool
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.local_sgd import LocalSgd, OuterOptimizer
from trainkit.trainer.manifest import list_complete

# 37 points in batches of 16 and 5; 29 sequences in batches of 8 and 5, with unequal numbers of targets

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=4)
TOKENS = Case(task="tokens", global_size=8, micro_size=2)


def local(case: Case, replicas: int, **settings: Any) -> Case:
    return replace(case, strategy="local_sgd", settings={"replicas": replicas, **settings})


def by_hand(case: Case, averaging: apart.Averaging) -> dict[str, torch.Tensor]:
    model = apart.train(averaging, **arguments_of(case))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    "base", [CLASSES, replace(CLASSES, model={"norm": True}), TOKENS], ids=["classes", "norm", "tokens"]
)
def test_averaging_every_step_is_the_training_of_one_device_under_sgd(base: Case, replicas: int, pool: Pool) -> None:
    for rank in train(pool, local(base, replicas, average_every=1)):
        assert reference.differences(rank.weights, oracle(base)) == []


def with_a_spare() -> nn.Module:
    model = zoo.Net()
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return model


def test_a_parameter_without_gradient_decays_as_little_as_on_one_device(pool: Pool) -> None:
    case = replace(CLASSES, build=with_a_spare, optimizer="adamw")
    assert_close(train(pool, local(case, 1, average_every=2)), alone(case))


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
        torch.testing.assert_close(rank.weights, expected, rtol=1e-12, atol=1e-13)


def test_the_first_steps_may_be_those_of_one_device(pool: Pool) -> None:
    case = replace(CLASSES, optimizer="adamw", num_steps=4)
    assert_reference(train(pool, local(case, 2, local_after=4)), case)
    apart_since = train(pool, local(replace(case, num_steps=6), 2, local_after=4, average_every=2))
    assert reference.differences(apart_since[0].weights, oracle(replace(case, num_steps=6))) != []


@pytest.mark.parametrize("optimizer", ["plain_sgd", "adagrad"])
def test_sparse_gradients_of_replicas_apart_are_dense_ones_to_rounding(optimizer: str, pool: Pool) -> None:
    dense, sparse = (
        local(Words(optimizer=optimizer, micro_size=2, num_steps=6, sparse=is_sparse), 3, average_every=3)
        for is_sparse in (False, True)
    )
    assert_close(train(pool, sparse), train(pool, dense)[0], atol=1e-13)


def test_momentum_of_sparse_gradients_is_averaged(pool: Pool) -> None:
    ranks = train(pool, local(Words(optimizer="sgd", micro_size=2, num_steps=6), 3, average_every=3))
    key = "optimizer/momentum_buffer/embed.weight"
    assert all(torch.equal(rank.state[key], ranks[0].state[key]) for rank in ranks)


def exchanges(member: Member, case: Case) -> list[tuple[int, int]]:
    """All-reduces and gathers of a training of one step, of two, and so on."""
    plain, counts = (dist.all_reduce, dist.all_gather), [0, 0]

    def counted(index: int) -> Any:
        def exchange(*args: Any, **kwargs: Any) -> Any:
            counts[index] += 1
            return plain[index](*args, **kwargs)

        return exchange

    calls = []
    dist.all_reduce, dist.all_gather = counted(0), counted(1)
    try:
        for steps in range(1, case.num_steps + 1):
            counts[:] = 0, 0
            run_rank(replace(member, prefix=f"{member.prefix}/{steps}"), replace(case, num_steps=steps))
            calls.append((counts[0], counts[1]))
    finally:
        dist.all_reduce, dist.all_gather = plain
    return calls


@pytest.mark.parametrize("base", [replace(CLASSES, optimizer="adamw", model={"norm": True}), Words(micro_size=2)])
def test_replicas_meet_once_every_k_steps(base: Case, pool: Pool) -> None:
    case = local(replace(base, num_steps=7), 2, average_every=3)
    first, _ = pool.run("tests.contract.test_local_sgd.exchanges", case, num_ranks=2)
    reduces, gathers = zip(*first, strict=True)
    assert reduces == (0, 0, 1, 1, 1, 2, 2)
    assert len(set(gathers)) == 1  # of the first step, and of the losses that this test sums


def test_a_training_continued_at_an_average_ends_in_the_same_bits(pool: Pool) -> None:
    case = local(replace(CLASSES, optimizer="adamw", num_steps=9), 2, average_every=3, outer={"lr": 0.7})
    expected = train(pool, case)[0]
    for rank in assert_bits(train(pool, replace(case, resume_at=6)), expected):
        assert rank.state.keys() == expected.state.keys()
    assert "optimizer/outer_momentum/0.weight" in expected.state


SHARDED: dict[str, dict[str, Any]] = {
    "norm and clipping": {"model": {"norm": True}, "max_norm": 0.05},
    "first as one device": {"optimizer": "adamw", "local_after": 3},
    "continued": {"optimizer": "adamw", "outer": {"lr": 0.7}, "resume_at": 6},
    "in masters": {"precision": "bf16", "optimizer": "adamw"},
    "a replica without a sample": {"optimizer": "adamw", "micro_size": 8, "replicas": 3},  # the batch of 5 is one shard
}


@pytest.mark.parametrize("kind", SHARDED)
def test_replicas_that_are_sharded_train_as_whole_ones(kind: str, pool: Pool) -> None:
    extra = dict(SHARDED[kind])
    settings = {"replicas": 2} | {key: extra.pop(key) for key in ("outer", "local_after", "replicas") if key in extra}
    case = replace(CLASSES, **{"micro_size": 3, "num_steps": 9, **extra})  # a batch of 5 leaves a rank without a shard
    expected = train(pool, local(case, average_every=3, **settings))[0].state
    rtol, atol = (1e-12, 1e-13) if case.precision == "fp64" else (2.0**-7, 2.0**-9)
    for rank in train(pool, local(case, shard=2, average_every=3, **settings)):
        torch.testing.assert_close(rank.state, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shard", [1, 2])
def test_it_is_another_training_however_its_replicas_are_sharded(shard: int) -> None:
    assert LocalSgd(shard=shard).facts_in(PlanContext()).changes_maths


def test_a_checkpoint_of_sharded_replicas_continues_in_whole_ones_and_back(pool: Pool, tmp_path: Path) -> None:
    case = replace(CLASSES, optimizer="adamw", num_steps=9)
    unsharded, sharded = (local(case, 2, shard=shard, average_every=3, outer={"lr": 0.7}) for shard in (1, 2))
    first = cross(pool, replace(sharded, num_steps=9), source=None, target=tmp_path, saves_at=3)
    second = cross(pool, unsharded, source=tmp_path / "step_00000003", target=tmp_path, saves_at=6)
    third = cross(pool, sharded, source=tmp_path / "step_00000006", target=tmp_path, saves_at=9)
    undisturbed = first[0].losses
    for later in (second[0].losses, third[0].losses):
        torch.testing.assert_close(torch.tensor(later), torch.tensor(undisturbed[-len(later) :]), rtol=1e-12, atol=0)
    assert (len(second[0].losses), len(third[0].losses)) == (6, 3)


@pytest.mark.parametrize(("before", "after"), [("one_device", "local_sgd"), ("local_sgd", "one_device")])
def test_a_checkpoint_of_either_kind_loads_in_the_other(before: str, after: str) -> None:
    settings = {"local_sgd": {"replicas": 1, "average_every": 2, "outer": {"lr": 0.7}}, "one_device": {}}
    case = replace(CLASSES, optimizer="adamw", num_steps=4)
    saved = run_rank(None, replace(case, strategy=before, settings=settings[before])).state
    strategy = replace(case, strategy=after, settings=settings[after], num_steps=0, start=saved)
    loaded = run_rank(None, strategy).state
    assert [name for name, tensor in saved.items() if name in loaded and not torch.equal(loaded[name], tensor)] == []


# one replica and an outer optimizer: windows and averages without a second process
ALONE = (
    "model=net", "data=points", "batch.global_size=16", "batch.micro_size=5", "optimizer=adamw", "steps=10",
    "strategy=local_sgd", "strategy.replicas=1", "strategy.average_every=4", "strategy.outer.lr=0.7",
)  # fmt: skip


def test_a_run_is_evaluated_and_saved_at_averages_and_at_its_end(tmp_path: Path) -> None:
    every = ("eval.every_epochs=null", "eval.every_steps=5", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    run(tmp_path / "run", *ALONE, *every, "checkpoint.keep_best=0")
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "val/loss" in row] == [8, 10]
    assert sorted(checkpoint.step for checkpoint in list_complete(tmp_path / "run" / "checkpoints")) == [4, 8, 10]


@pytest.mark.slow
def test_a_run_stopped_between_averages_goes_on_to_the_next_and_is_continued_exactly(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "whole", *ALONE)
    first = run(tmp_path / "parts", *ALONE, "stop_at_step=5")
    assert (first["status"], first["steps"]) == ("stopped", 8)
    second = run(tmp_path / "parts", *ALONE, "resume=auto")
    assert (second["steps"], second["weights_sha256"]) == (10, undisturbed["weights_sha256"])


@pytest.mark.slow
def test_replicas_are_compared_where_they_are_alike(tmp_path: Path) -> None:
    two = ("strategy.replicas=2", "strategy.local_after=2", "numerics.check_replicas_every=1")
    result = run(tmp_path, *ALONE, *two)
    assert (result["status"], result["steps"]) == ("finished", 10)


def problems(strategy: LocalSgd, **facts: Any) -> list[str]:
    return [str(problem) for problem in strategy.validate(PlanContext(**facts))]


def test_what_replicas_that_differ_cannot_keep_is_refused() -> None:
    assert problems(LocalSgd(), numerics=Numerics(reproducible=True)) == [
        "numerics.reproducible=true: local_sgd depends on the number of replicas. Use strategy=mirrored, or false.",
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_overflows_repeats_its_step_alone(replicas: int, pool: Pool) -> None:
    wide = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, micro_size=8, num_steps=10)
    case = replace(wide, initial_scale=2.0**24)
    ranks = train(pool, local(case, replicas, average_every=5))
    assert {rank.scale for rank in ranks} == {ranks[0].scale}
    assert ranks[0].scale < 2.0**24
    full = train(pool, local(replace(case, precision="fp32"), replicas, average_every=5))[0].weights
    rtol = 2.0**-9  # the products have 11 bits
    for rank in assert_bits(ranks, ranks[0]):
        for name, tensor in full.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=rtol, atol=rtol * float(tensor.abs().max()))


def test_a_setting_of_an_outer_optimizer_that_is_not_there_is_refused() -> None:
    expected = "has no effect without strategy.outer.lr: the average itself becomes the parameters."
    assert problems(LocalSgd(outer=OuterOptimizer(momentum=0.5))) == [f"strategy.outer.momentum=0.5: {expected}"]
    assert problems(LocalSgd(outer=OuterOptimizer(nesterov=False))) == [f"strategy.outer.nesterov=false: {expected}"]
