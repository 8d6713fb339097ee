"""What each compression of gradients loses, and what it leaves alone.

Compression that also rounds buffers or counted weights, or whole gradients that a resumed PowerSGD sends again is
caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.stepping import Case, train
from tests.support.pool import Place, Pool
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.reducers.vector import BackendReducer, Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
# layers of 24 x 6 and 3 x 24, of which PowerSGD compresses the first; ten steps of ragged batches
BASE = Case(strategy="mirrored", global_size=16, micro_size=4, num_steps=10, precision="fp32", model={"width": 24})


def compressed(base: Case, **settings: Any) -> Case:
    return replace(base, settings={"replicas": 2, **settings})


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((a[name].double() - b[name].double()).norm() / b[name].double().norm()) for name in b)


# measured 7.6e-3, 8.1e-4 and 0.25, of products with unit roundoffs of 2^-9 and 2^-12, and of half a gradient's ranks
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"compression": "bf16"}, 1e-4, 2.0**-6),
        ({"compression": "fp16"}, 1e-5, 2.0**-9),
        ({"compression": "powersgd", "powersgd_after": 2}, 1e-3, 1.0),
    ],
)
def test_ten_steps_lose_what_the_contract_says(settings: Any, least: float, most: float, pool: Pool) -> None:
    expected = train(pool, compressed(BASE))[0].weights
    ranks = train(pool, compressed(BASE, **settings))
    assert least < distance(ranks[0].weights, expected) < most
    assert all(torch.equal(tensor, ranks[1].weights[name]) for name, tensor in ranks[0].weights.items())


def test_powersgd_of_the_gradients_own_rank_loses_nothing(pool: Pool) -> None:
    # three classes: the gradient of a layer has rank 2
    settings = {"compression": "powersgd", "powersgd_after": 2, "powersgd_rank": 2}
    trained = train(pool, compressed(BASE, **settings))[0].weights
    assert distance(trained, train(pool, compressed(BASE))[0].weights) < 1e-5


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_buckets_change_nothing(kind: str, pool: Pool) -> None:
    whole = train(pool, compressed(BASE, compression=kind))[0].weights
    parts = train(pool, compressed(BASE, compression=kind, bucket_mb=1e-4))[0].weights
    assert all(torch.equal(tensor, whole[name]) for name, tensor in parts.items())


def sums_of(place: Place, kind: Any) -> list[list[float]]:
    """Two gradients of 1.0001, then what is no gradient."""
    packing = FlatBuffer([torch.Size([1]), torch.Size([])] + [torch.Size([1])] * 2, torch.float32, CPU, num_grads=2)
    reducer = BackendReducer(compressor=Compressor(kind, powersgd_after=2))
    own = [torch.full(shape, 1.0001) for shape in packing.shapes]
    for _ in range(3):
        reducer.begin(packing, num_shards=place.num_ranks)
        reducer.add(0, own)
        sums = reducer.finish()
    return [one.tolist() for one in sums if one is not None]


@pytest.mark.parametrize(("kind", "expected"), [("bf16", 2.0), ("fp16", 2.0), ("powersgd", 2.0002)])
def test_buffers_and_counted_weights_are_never_compressed(kind: str, expected: float, pool: Pool) -> None:
    for found in pool.run("tests.contract.test_compression.sums_of", kind, num_ranks=2, group=True):
        assert found == [[pytest.approx(expected)], pytest.approx(expected), *([[pytest.approx(2.0002)]] * 2)]


def wire_bytes(place: Place, kind: Any) -> list[int]:
    """Bytes of every all-reduce of three steps over a matrix of 64 x 64 and a vector of 64."""
    sizes: list[int] = []
    whole = dist.all_reduce

    def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return whole(tensor, *args, **options)

    packing = FlatBuffer([torch.Size([64, 64]), torch.Size([64])], torch.float32, CPU)
    compressor = None if kind == "none" else Compressor(kind, powersgd_after=2)
    reducer = BackendReducer(compressor=compressor)
    dist.all_reduce = count
    try:
        for step in range(3):
            own = [torch.full(shape, 1.0 + step) for shape in packing.shapes]
            reducer.begin(packing, num_shards=place.num_ranks)
            reducer.add(0, own)
            reducer.finish()
    finally:
        dist.all_reduce = whole
    return sizes


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [16_640] * 3),
        ("bf16", [8_320] * 3),
        ("fp16", [8_320] * 3),
        ("powersgd", [16_640, 16_640, 256, 256, 256]),  # two whole steps, then the vector and two thin matrices
    ],
)
def test_fewer_bytes_are_sent(kind: str, expected: list[int], pool: Pool) -> None:
    assert pool.run("tests.contract.test_compression.wire_bytes", kind, num_ranks=2, group=True) == [expected] * 2


def resumed(place: Place) -> list[int]:
    from tests.contract.stepping import _Rank

    rank = _Rank(place, compressed(BASE, compression="powersgd", powersgd_after=4))
    executor = rank.setup(0)
    rank.steps(executor, 3)
    kept = executor.state_dict_extra()
    assert isinstance(executor.local, Replica)
    compressor = executor.local.reducer.compressor
    assert compressor is not None
    compressor.set_steps(0)
    executor.load_state_extra(kept)
    found = [compressor.steps]
    executor.close()
    return found


def test_a_resumed_run_sends_no_whole_gradients_again(pool: Pool) -> None:
    assert pool.run("tests.contract.test_compression.resumed", num_ranks=2) == [[3], [3]]


def test_compression_changes_the_fingerprint_and_a_reducer_does_not() -> None:
    def of(**settings: Any) -> str:
        return fingerprint(RunConfig(strategy={"_target_": "trainkit.strategies.Mirrored", **settings}))

    assert of(reduce="ring", compression="none", powersgd_rank=1, powersgd_after=1000, bucket_mb=1.0) == of()
    assert (
        len({of(), of(compression="bf16"), of(compression="powersgd"), of(compression="powersgd", powersgd_rank=2)})
        == 4
    )
