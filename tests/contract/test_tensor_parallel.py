"""Tensor parallelism is the training of one device: layers cut by a plan, replicas plain or sharded.

A cut layer whose bias is added on each rank, or whose input gradient is not summed is caught here alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.stepping import Case, oracle, train
from tests.support import zoo
from tests.support.pool import Place, Pool, TaskError
from tests.support.requests import request_for
from trainkit.cluster.tasks import Identity, Task
from trainkit.numerics.precision import Precision
from trainkit.strategies.mesh.strategy import TensorParallel

TWO = {"degree": 2, "replicas": 1}
COPIES = {"degree": 2, "replicas": 2}
SHARDED = {"shard": 2, "tensor": 2}
MLP = {"0": "colwise", "2": "rowwise"}

GPT = Case(strategy="tensor_parallel", task="tokens", build=zoo.even_gpt, settings=TWO, max_norm=0.1)
NET = Case(strategy="tensor_parallel", task="classes", model={"width": 8}, global_size=16, max_norm=0.05)


def check(case: Case, pool: Pool) -> None:
    ranks = assert_reference(train(pool, case), case)
    assert min(ranks[0].norms) > (case.max_norm or 0.0)


@pytest.mark.parametrize(
    ("settings", "optimizer", "bias"),
    [(TWO, "adamw", False), (COPIES, "sgd", True)],
    ids=["two ranks", "two replicas"],
)
@pytest.mark.slow
def test_a_language_model_cut_by_its_own_plan_is_that_of_the_reference(
    settings: dict[str, object], optimizer: str, bias: bool, pool: Pool
) -> None:
    # without biases under AdamW: that of a key has no gradient, and AdamW makes steps of its rounding
    check(replace(GPT, optimizer=optimizer, settings=settings, model={"bias": bias}, micro_size=3), pool)


EVEN = replace(GPT, samples=zoo.EvenSentences, micro_size=4)
STREAM = {
    "embed": "sequence_split",
    "blocks.*_norm": "sequence",
    "queries_keys_values": "colwise_sequence",
    "expand": "colwise_sequence",
    "project": "rowwise_sequence",
    "head": "sequence_join",
    "head.output": "colwise_gathered",
    "embed.tokens": "rowwise",
}


def test_layers_that_stay_whole_in_a_cut_sequence_are_those_of_the_reference(pool: Pool) -> None:
    plan = {"mlp": "sequence", "attention.project": "rowwise_sequence"}
    plan |= {name: style for name, style in STREAM.items() if name not in ("expand", "project")}
    check(replace(EVEN, settings=COPIES | {"plan": plan}), pool)


def test_the_head_of_a_resnet_is_cut_as_the_reference(pool: Pool) -> None:
    plan = {"type:Linear": "rowwise_scattered"}
    base = Case(task="resnet", strategy="tensor_parallel", micro_size=4, num_steps=4, rate_scale=0.1, max_norm=0.1)
    check(replace(base, settings=TWO | {"plan": plan}), pool)


DROPS = replace(NET, model={"width": 8, "dropout": 0.5}, micro_size=3)
DROPPING: dict[str, tuple[Case, dict[str, Any]]] = {
    "whole activations": (DROPS, TWO | {"plan": {"0": "colwise_gathered"}}),
    "cut features": (DROPS, COPIES | {"plan": {"0": "colwise", "2": "dropout", "3": "rowwise"}}),
    "heads": (replace(GPT, model={"dropout": 0.3}, micro_size=3), COPIES),
    "a sequence": (
        replace(EVEN, model={"dropout": 0.3}),
        COPIES | {"plan": STREAM | {"blocks.*.dropout": "sequence"}},
    ),
}


@pytest.mark.parametrize("where", DROPPING)
def test_what_is_dropped_out_of_parts_is_that_of_one_device(where: str, pool: Pool) -> None:
    base, settings = DROPPING[where]
    assert_close(train(pool, replace(base, settings=settings)), alone(base))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(DROPS, settings=TWO | {"plan": {"0": "colwise", "3": "rowwise"}}), "2 (Dropout) draws"),
        (replace(EVEN, settings=TWO | {"plan": STREAM}, model={"dropout": 0.3}), "blocks.0.dropout (Dropout) draws"),
    ],
    ids=["features", "a sequence"],
)
def test_code_that_draws_for_its_part_without_saying_so_is_refused(case: Case, said: str, pool: Pool) -> None:
    with pytest.raises(TaskError, match=f"{re.escape(said)} random numbers for activations that .* has cut"):
        train(pool, case)


@pytest.mark.parametrize(
    ("strategy", "settings"), [("tensor_parallel", TWO), ("mesh", SHARDED)], ids=["two ranks", "sharded"]
)
def test_rounded_parameters_have_masters_that_are_cut_and_saved(
    strategy: str, settings: dict[str, object], pool: Pool
) -> None:
    base = replace(GPT, strategy=strategy, precision="bf16", rate_scale=0.1, settings=settings, micro_size=4)
    whole, parted = train(pool, base)[0], train(pool, replace(base, resume_at=4))[0]
    assert {tensor.dtype for key, tensor in whole.state.items() if key.startswith("param/")} == {torch.float32}
    for name, tensor in whole.state.items():
        torch.testing.assert_close(parted.state[name], tensor, rtol=0, atol=0)
    assert whole.losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)


def drift(place: Place, wrong: int, name: str) -> str | None:
    """What the check of the replicas says, once a rank has changed one bit of what it holds."""
    strategy = TensorParallel(degree=2, replicas=2, plan=MLP)
    task = Task(role="worker", index=place.rank, rank=place.rank, device="cpu")
    request = request_for(
        zoo.Net(width=8),
        identity=Identity(task=task, num_ranks=place.num_ranks, store=place.store, prefix=place.prefix),
        precision=Precision(value="fp32"),
        make_optimizer=lambda params: torch.optim.SGD(list(params.values()), lr=0.1),
    )
    executor = strategy.setup(request)
    if place.rank == wrong:
        executor.local.params[name].detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    said = executor.check_replicas()
    executor.close()
    return said


@pytest.mark.parametrize(
    ("wrong", "name", "said"),
    [
        (-1, "0.weight", None),
        (3, "0.weight", "the parameter 0.weight differs on rank 3 from rank 1, which holds the same part of it."),
        (1, "2.bias", "the parameter 2.bias differs on rank 1 from rank 0, which holds the same part of it."),
    ],
)
def test_one_changed_bit_of_a_part_is_found_and_named(wrong: int, name: str, said: str | None, pool: Pool) -> None:
    found = pool.run("tests.contract.test_tensor_parallel.drift", wrong, name, num_ranks=4)
    assert found == [said] * 4
