"""Every way to sum gradients over ranks, against the oracle; what compression loses; a single rank in its own group.

A way to sum gradients that leaves out, doubles, scales or reorders a rank's part, and compression that also rounds
buffers or counted weights are caught here alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.checks import assert_bits, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, train
from tests.support.pool import Member, Pool
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.strategies.base import PlanContext
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.reducers.options import Reduce
from trainkit.strategies.reducers.vector import BackendReducer, Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer

# an odd number of replicas, and two groups of two
PLACES = [*((reduce, 3) for reduce in get_args(Reduce)), ("hierarchical", 4)]
# 29 sequences in batches of 8 and 5, with unequal numbers of targets: the counted weight is exchanged too
TOKENS = Case(strategy="mirrored", task="tokens", global_size=8)
# 37 points in batches of 16 and 5, in shards of 6 and 5: batch statistics are exchanged too, by ranks without a shard
CLASSES = Case(strategy="mirrored", task="classes", global_size=16, micro_size=6, model={"norm": True})


@pytest.mark.parametrize(("reduce", "replicas"), PLACES)
@pytest.mark.slow
def test_every_reducer_takes_the_steps_of_the_reference(reduce: str, replicas: int, pool: Pool) -> None:
    once, thrice = (replace(TOKENS, micro_size=-(-8 // (replicas * shards))) for shards in (1, 3))
    for base in (once, thrice, CLASSES):
        case = replace(base, settings={"replicas": replicas, "reduce": reduce})
        ranks = assert_reference(train(pool, case), case)
        assert_bits(ranks, ranks[0])


@pytest.mark.parametrize("bucket_mb", [0, 1e-6, 3e-4])
def test_buckets_of_any_size_take_the_steps_of_the_reference(bucket_mb: float, pool: Pool) -> None:
    settings = {"replicas": 3, "bucket_mb": bucket_mb}
    for base in (replace(TOKENS, micro_size=1), CLASSES):
        case = replace(base, settings=settings, max_norm=0.05)
        assert_reference(train(pool, case), case)


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
    expected = train(pool, compressed(BASE, compression=kind))[0].weights
    parts = train(pool, compressed(BASE, compression=kind, bucket_mb=1e-4))[0].weights
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parts.items())


def sums_of(member: Member, kind: Any) -> list[list[float]]:
    """Two gradients of 1.0001, then what is no gradient."""
    packing = FlatBuffer([torch.Size([1]), torch.Size([])] + [torch.Size([1])] * 2, torch.float32, CPU, num_grads=2)
    reducer = BackendReducer(compressor=Compressor(kind, powersgd_after=2))
    grads = [torch.full(shape, 1.0001) for shape in packing.shapes]
    for _ in range(3):
        reducer.begin(packing, num_shards=member.num_ranks)
        reducer.add(0, grads)
        sums = reducer.finish()
    return [total.tolist() for total in sums if total is not None]


@pytest.mark.parametrize(("kind", "expected"), [("bf16", 2.0), ("fp16", 2.0), ("powersgd", 2.0002)])
def test_buffers_and_counted_weights_are_never_compressed(kind: str, expected: float, pool: Pool) -> None:
    for sums in pool.run("tests.contract.test_reducers.sums_of", kind, num_ranks=2, group=True):
        assert sums == [[pytest.approx(expected)], pytest.approx(expected), *([[pytest.approx(2.0002)]] * 2)]


def wire_bytes(member: Member, kind: Any) -> list[int]:
    """Bytes of every all-reduce of three steps over a matrix of 64 x 64 and a vector of 64."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **options)

    packing = FlatBuffer([torch.Size([64, 64]), torch.Size([64])], torch.float32, CPU)
    compressor = None if kind == "none" else Compressor(kind, powersgd_after=2)
    reducer = BackendReducer(compressor=compressor)
    dist.all_reduce = count
    try:
        for step in range(3):
            grads = [torch.full(shape, 1.0 + step) for shape in packing.shapes]
            reducer.begin(packing, num_shards=member.num_ranks)
            reducer.add(0, grads)
            reducer.finish()
    finally:
        dist.all_reduce = all_reduce
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
    assert pool.run("tests.contract.test_reducers.wire_bytes", kind, num_ranks=2, group=True) == [expected] * 2


def state_after_resume(member: Member) -> dict[str, object]:
    from tests.contract.stepping import _Rank

    rank = _Rank(member, compressed(BASE, compression="powersgd", powersgd_after=4))
    executor = rank.setup(0)
    rank.steps(executor, 3)
    saved = executor.state_dict_extra()
    executor.load_state_extra({})
    executor.load_state_extra(saved)
    extra = dict(executor.state_dict_extra())
    with pytest.raises(ValueError, match="other values than whole numbers"):
        executor.load_state_extra({"compressed_steps": [3]})
    executor.close()
    return extra


def test_a_resumed_run_sends_no_whole_gradients_again(pool: Pool) -> None:
    assert pool.run("tests.contract.test_reducers.state_after_resume", num_ranks=2) == [{"compressed_steps": 3}] * 2


def test_compression_changes_the_fingerprint_and_a_reducer_does_not() -> None:
    def of(**settings: Any) -> str:
        return fingerprint(RunConfig(strategy={"_target_": "trainkit.strategies.Mirrored", **settings}))

    assert of(reduce="ring", compression="none", powersgd_rank=1, powersgd_after=1000, bucket_mb=1.0) == of()
    assert (
        len({of(), of(compression="bf16"), of(compression="powersgd"), of(compression="powersgd", powersgd_rank=2)})
        == 4
    )


RUN = ("recipe=digits", "precision=fp64", "steps=4", "batch.micro_size=16", "eval.every_epochs=null", "quiet=true")
ALONE = ("strategy.replicas=1", "strategy.process_group=always")


def digest(folder: Path, *overrides: str) -> str:
    """A hash of the weights that a run ends with."""
    tensors = weights(run(folder, *RUN, *overrides))
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


@pytest.mark.parametrize(
    "reduce",
    [
        "backend",
        "auto",
        *(pytest.param(reduce, marks=pytest.mark.long) for reduce in ("ring", "hierarchical", "to_one_device")),
    ],
)
@pytest.mark.slow
def test_each_reducer_alone_in_its_group_gives_the_bits_of_one_device(tmp_path: Path, reduce: str) -> None:
    alone = digest(tmp_path / "alone", "strategy=mirrored", *ALONE, f"strategy.reduce={reduce}")
    assert alone == digest(tmp_path / "one", "strategy=one_device")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_exchanges_really_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return all_reduce(*args, **named)

    monkeypatch.setattr(dist, "all_reduce", counted)
    digest(tmp_path / "auto", "strategy=mirrored", "strategy.replicas=1")
    assert calls == []
    digest(tmp_path / "always", "strategy=mirrored", *ALONE)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("sync", "more"),
    [("each", ()), ("last", ()), ("each", ("numerics.reproducible=true", "optimizer.fused=false"))],
    ids=["each", "last", "lanes"],
)
@pytest.mark.slow
def test_fully_sharded_over_one_rank_gives_the_bits_of_one_device(
    tmp_path: Path, sync: str, more: tuple[str, ...]
) -> None:
    more = (*more, "clip.max_norm=0.5")
    alone = digest(tmp_path / "alone", "strategy=fsdp", *ALONE, f"strategy.sync={sync}", *more)
    assert alone == digest(tmp_path / "one", "strategy=one_device", *more)


def test_shared_memory_needs_a_second_replica() -> None:
    (problem,) = Mirrored(replicas=1, process_group="always", reduce="shared_memory").validate(PlanContext())
    assert problem.rule.startswith("needs two replicas or more, and strategy.process_group=always has one.")
