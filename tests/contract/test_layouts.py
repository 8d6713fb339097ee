"""Parameters that are not contiguous: every tensor that belongs to one has its strides, under every strategy.

A strategy that reads a transposed or channels-last parameter by the strides of a contiguous one is caught here alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import assert_reference
from tests.contract.stepping import STRATEGIES, Case, refused_by_rank, train
from tests.support import zoo
from tests.support.pool import Member, Pool
from tests.support.requests import request_for
from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import ConfigError
from trainkit.numerics.precision import Precision
from trainkit.strategies.one_device import OneDevice
from trainkit.trainer.checkpoint.tensors import weights_sha256

pytestmark = pytest.mark.pairwise

# Gradients of the first are sums over 2 shards a replica, of the second over 1; the last batch of an epoch is short.
CHANNELS_LAST = Case(task="channels_last", global_size=8, micro_size=2)
TRANSPOSED = Case(task="transposed", global_size=16, micro_size=8)
BASES = pytest.mark.parametrize("base", [CHANNELS_LAST, TRANSPOSED], ids=["channels_last", "transposed"])
TIED = Case(task="transposed_tied", optimizer="adamw", global_size=8, micro_size=2)
REPRODUCIBLE: dict[str, Any] = {"precision": "fp32", "reproducible": True, "optimizer": "adamw", "max_norm": 0.5}


def _sha256s(pool: Pool, case: Case) -> list[str]:
    return [weights_sha256(rank.state) for rank in train(pool, case)]


def placed(case: Case, strategy: str, **settings: Any) -> Case:
    return replace(case, strategy=strategy, settings=settings)


@BASES
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_six_steps_clipped_and_resumed_are_those_of_the_reference(
    base: Case, strategy: str, optimizer: str, pool: Pool
) -> None:
    case = placed(replace(base, optimizer=optimizer, max_norm=0.5), strategy)
    assert_reference(train(pool, replace(case, resume_at=4)), case)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("mirrored", {"replicas": 3, "bucket_mb": 1e-4}),
        ("fsdp", {"replicas": 4, "replicate": 2}),
        ("tensor_parallel", {"degree": 2, "replicas": 2, "plan": {"0": "colwise", "2": "rowwise"}}),
        ("mesh", {"shard": 2, "tensor": 2, "plan": {"0": "colwise", "2": "rowwise"}}),
        ("pipeline", {"stages": 2, "replicas": 2}),
        ("central_storage", {"compute_devices": ["cpu", "cpu", "cpu"]}),
        ("parameter_server", {"workers": 2, "servers": 2, "devices_per_worker": 2}),
    ],
    ids=["buckets", "hybrid", "layers", "shared out", "stages", "threads", "servers"],
)
def test_layers_groups_and_servers_keep_the_layout(strategy: str, settings: dict[str, Any], pool: Pool) -> None:
    case = replace(TRANSPOSED, model={"width": 8}, micro_size=4, optimizer="adamw", max_norm=0.05)
    case = placed(case, strategy, **settings)
    assert_reference(train(pool, replace(case, resume_at=4)), case)


@pytest.mark.parametrize("reduce", ["shared_memory", "ring", "hierarchical", "to_one_device", "auto"])
def test_every_reducer_gives_gradients_the_strides_of_their_parameters(reduce: str, pool: Pool) -> None:
    case = placed(TRANSPOSED, "mirrored", replicas=3, reduce=reduce)
    assert_reference(train(pool, case), case)


@BASES
@pytest.mark.slow
def test_reproducible_runs_end_in_the_same_bits_on_three_replicas_and_resumed(base: Case, pool: Pool) -> None:
    base = replace(base, **REPRODUCIBLE)
    expected = weights_sha256(train(pool, base)[0].state)
    many = placed(base, "mirrored", replicas=3)
    ranks = [*train(pool, many), *train(pool, replace(many, resume_at=4))]
    assert {weights_sha256(rank.state) for rank in ranks} == {expected}


# no convolutions in bf16: two runs of one command differ on CPUs, tidy or not, unless algorithms are deterministic
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    "base",
    [replace(CHANNELS_LAST, precision="fp32"), replace(TRANSPOSED, precision="fp32"), replace(TIED, precision="bf16")],
    ids=["channels_last", "transposed", "masters"],
)
def test_a_resumed_run_of_one_device_ends_in_the_same_bits(base: Case, reproducible: bool, pool: Pool) -> None:
    # restored averages were contiguous, and a fused kernel paired them with elements of other places
    case = replace(base, optimizer="adamw", reproducible=reproducible)
    assert _sha256s(pool, replace(case, resume_at=4)) == _sha256s(pool, case)


@BASES
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("central_storage", {}),
        ("device_map", {"map": {"0": "cpu", "rest": "/cpu:0"}}),
        ("parameter_server", {"workers": 1, "servers": 1}),
        ("parameter_server", {"workers": 2, "servers": 2}),
    ],
    ids=["central_storage", "device_map", "one server", "two servers"],
)
def test_other_strategies_have_the_reproducible_bits_of_one_device(
    base: Case, strategy: str, settings: dict[str, Any], pool: Pool
) -> None:
    # a server whose variable lay in memory otherwise would round other elements in the last, short vector
    case = replace(base, **REPRODUCIBLE)
    assert _sha256s(pool, replace(placed(case, strategy, **settings), resume_at=4)) == _sha256s(pool, case)


@pytest.mark.parametrize("settings", [{}, {"outer": {"lr": 0.7}}], ids=["average", "outer"])
def test_replicas_trained_apart_are_those_of_contiguous_weights(settings: dict[str, Any], pool: Pool) -> None:
    case = replace(TRANSPOSED, optimizer="adamw", strategy="local_sgd")
    case = replace(case, settings={"replicas": 2, "average_every": 2, **settings})
    tidy = train(pool, replace(case, task="classes"))[0].weights
    for rank in train(pool, replace(case, resume_at=4)):
        for name, tensor in tidy.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-12, atol=1e-13)


def sliced() -> nn.Module:
    """The first weight is a slice of a larger tensor, which no update may touch beside it."""
    model = zoo.Net()
    wide = torch.full((7, 11), 9.0)
    wide[:, :6] = model.get_parameter("0.weight").detach()
    model[0].weight = nn.Parameter(wide[:, :6])
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slice_of_a_larger_tensor_is_trained_as_the_reference_does(strategy: str, pool: Pool) -> None:
    # torch's own fused kernel walks over the elements between the rows
    plain = Case(global_size=16, micro_size=8, optimizer="adamw")
    assert_reference(train(pool, placed(replace(plain, build=sliced), strategy)), plain)


def with_other_strides_on_rank_1(member: Member, case: Case) -> str:
    """The refusal of one rank of a case, whose second rank has transposed weights."""
    return refused_by_rank(member, replace(case, task="transposed" if member.rank else "classes"))


def test_strides_that_differ_between_ranks_are_refused_by_name(pool: Pool) -> None:
    case = placed(TRANSPOSED, "mirrored")
    for refused in pool.run("tests.contract.test_layouts.with_other_strides_on_rank_1", case, num_ranks=2):
        assert "the parameter 0.weight has different strides on rank 1 and on rank 0" in refused


def test_an_expanded_parameter_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.zeros(1).expand(2))
    task = Task(role="worker", index=0, rank=0, device="cpu")
    arguments: dict[str, Any] = {"precision": Precision(value="bf16"), "make_optimizer": lambda _params: None}
    request = request_for(model, identity=Identity(task=task, num_ranks=1, token="test"), **arguments)
    with pytest.raises(ConfigError, match=r"model: bias is an expanded tensor, .* nn\.Parameter\(tensor\.clone\(\)\)"):
        OneDevice().setup(request)
