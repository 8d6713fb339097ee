"""A sum of gradients that an earlier step, or a shard without a parameter, leaks into is caught here alone.

So are gradients that are exchanged once a shard instead of once a step, and a group of some ranks that waits longer
than the group of all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from tests.contract.running import run
from tests.contract.stepping import Case, run_rank
from tests.support import zoo
from tests.support.pool import Place, Pool
from tests.support.storages import Counting
from trainkit.cluster.tasks import Identity
from trainkit.errors import TrainingError
from trainkit.strategies.collectives import GroupCollective
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.groups import process_group
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.pipeline.groups import new_groups
from trainkit.strategies.reducers import vector
from trainkit.strategies.reducers.vector import BackendReducer, VectorReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
LAYER = 64 * 64


def layers(count: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(count)))


class Alone(VectorReducer):
    """A reducer of one rank."""

    def sum(self, flat: Tensor) -> None: ...


def packing_of(params: list[nn.Parameter]) -> FlatBuffer:
    return FlatBuffer.like(params, torch.float32, CPU)


def shard(reducer: VectorReducer, params: list[nn.Parameter], loss: Tensor, *, is_last: bool = False) -> None:
    reducer.begin_backward(params, is_last=is_last)
    loss.backward()  # type: ignore[no-untyped-call]
    reducer.end_backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_backward_the_gradients_are_alive_once(dtype: torch.dtype) -> None:
    model = layers(dtype=dtype)
    params, inputs = list(model.parameters()), torch.ones(1, 64, dtype=dtype)
    with Counting() as counting:
        for param in params:
            counting.see(param.untyped_storage())
        own = counting.bytes
        reducer = Alone(LAYER * 4)
        reducer.begin(packing_of(params), num_shards=3)
        for _ in range(3):
            shard(reducer, params, model(inputs).sum())
            assert counting.bytes - own == reducer.flat.nbytes == 8 * LAYER * 4
    assert counting.most - own < reducer.flat.nbytes + 2.5 * LAYER * dtype.itemsize, "two gradients, activations"
    reducer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, LAYER, 100 * LAYER])
def test_gradients_of_several_shards_have_the_bits_of_sums_in_float32(bucket: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = layers(3, dtype), torch.randn(3, 4, 64, dtype=dtype)
    params, expected = list(model.parameters()), [torch.zeros(64, 64) for _ in range(3)]
    for one in inputs:
        for total, grad in zip(expected, torch.autograd.grad(model(one).square().sum(), params), strict=True):
            total.add_(grad)
    reducer, packing = Alone(bucket * 4), packing_of(params)
    for _ in range(2):  # the second step finds the sums of the first in the vector
        model.zero_grad()
        reducer.begin(packing, num_shards=3)
        for one in inputs:
            shard(reducer, params, model(one).square().sum())
        reducer.finish()
        assert all(torch.equal(*pair) for pair in zip(reducer.views, expected, strict=True))
        held = [param.grad is view for param, view in zip(params, reducer.views, strict=True)]
        assert held == [dtype is torch.float32] * 3
    reducer.close()


def test_a_parameter_that_a_shard_does_not_use_keeps_its_sum_and_one_without_any_gets_zeros() -> None:
    model = layers(3)
    params = list(model.parameters())
    reducer, packing = Alone(LAYER * 4), packing_of(params)
    reducer.begin(packing, num_shards=2)
    reducer.flat.fill_(7.0)  # of an earlier step
    shard(reducer, params, params[0].sum())
    shard(reducer, params, params[1].sum())
    reducer.finish()
    assert [sorted(set(view.flatten().tolist())) for view in reducer.views] == [[1.0], [1.0], [0.0]]
    reducer.close()


def test_a_gradient_that_something_replaces_is_the_one_that_counts() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad * 10))  # type: ignore[no-untyped-call]
    reducer = Alone()
    reducer.begin(packing_of([weight]), num_shards=2)
    shard(reducer, [weight], weight.sum())
    shard(reducer, [weight], weight.sum())
    assert reducer.views[0].tolist() == [110.0] * 4


def test_new_gradients_of_the_last_pass_are_copied_together_with_the_buffers() -> None:
    weight = nn.Parameter(torch.ones(4))
    packing = FlatBuffer([torch.Size([4]), torch.Size([1])], torch.float32, CPU, num_grads=1)
    reducer = Alone(0)
    for shards in (1, 2):
        reducer.begin(packing, num_shards=shards)
        for number in range(shards):
            shard(reducer, [weight], weight.sum(), is_last=number == shards - 1)
        assert (weight.grad is reducer.views[0]) == (shards == 2), "the gradient of a single pass is copied once, later"
        reducer.add(0, [weight.grad, torch.full((1,), 9.0)])
        reducer.finish()
        assert reducer.flat.tolist() == [float(shards)] * 4 + [9.0]
        weight.grad = None


def test_an_interrupted_step_leaves_nothing_for_the_next() -> None:
    model, reducer = layers(2), Alone()
    params = list(model.parameters())
    packing = packing_of(params)
    reducer.begin(packing, num_shards=2)
    shard(reducer, params, sum(param.sum() for param in params))  # type: ignore[arg-type]
    reducer.begin_backward(params, is_last=True)  # the pass fails
    model.zero_grad()  # as `Replica.recover` does
    reducer.begin(packing, num_shards=2)
    for _ in range(2):
        shard(reducer, params, sum(param.sum() for param in params))  # type: ignore[arg-type]
    found = reducer.finish()
    assert [sorted(set(one.flatten().tolist())) for one in found if one is not None] == [[2.0], [2.0]]


SIGNS = {"exchange": "x", "first layer": "0", "layer": ".", "end": "|"}
DEEP = (
    "recipe=digits", f"model.hidden={[8] * 13}", "steps=2", "eval.every_epochs=null", "precision=bf16", "quiet=true",
    "strategy=mirrored", "strategy.replicas=1", "strategy.process_group=always", f"strategy.bucket_mb={200 / 2**20}",
    "objective.ignore_index=null",  # a counted weight is one more exchange, at the end
)  # fmt: skip


@pytest.mark.parametrize("more", [(), ("strategy.compression=bf16", "batch.micro_size=16")], ids=["", "compressed"])
def test_thirteen_of_fourteen_exchanges_begin_while_backward_computes(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    launch, arrive, end = BackendReducer.launch, BackendReducer._on_gradient, BackendReducer.end_backward

    def launched(self: Any, bucket: Any) -> None:
        events.append("exchange")
        launch(self, bucket)

    def arrived(self: Any, place: int, param: Tensor) -> None:
        events.append("first layer" if place < 2 else "layer")  # its bias may come first, or its weight
        arrive(self, place, param)

    def ended(self: Any) -> None:
        end(self)
        events.append("end")

    monkeypatch.setattr(BackendReducer, "launch", launched)
    monkeypatch.setattr(BackendReducer, "_on_gradient", arrived)
    monkeypatch.setattr(BackendReducer, "end_backward", ended)
    run(tmp_path, *DEEP, *more)
    last = "".join(map(SIGNS.__getitem__, events)).rstrip("|").rpartition("|")[2]  # the last pass of the last step
    assert last.count("x") == 14
    assert last.endswith("0x")
    assert last.count("x", 0, last.index("0")) == 13


PARAMETERS = sum(p.numel() for p in zoo.Net().parameters())


def counted(place: Place, case: Case) -> list[int]:
    """The elements of every all-reduce of a case."""
    sizes: list[int] = []
    whole = dist.all_reduce

    def count(tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return whole(tensor, **options)

    with mock.patch.object(dist, "all_reduce", count):
        run_rank(place, case)
    return sizes


@pytest.mark.parametrize(("micro_size", "bucket_mb", "expected"), [
    (8, 25.0, [PARAMETERS]), (2, 25.0, [PARAMETERS]),
    # four parameters of 42, 7, 21 and 3 elements of 8 bytes; buckets of at least 160 bytes, from the last parameter on
    (4, 160 / 2**20, [24, 49]),
], ids=["one shard", "accumulated", "buckets"])  # fmt: skip
def test_a_step_is_one_exchange_or_one_a_bucket_however_many_shards_are_accumulated(
    micro_size: int, bucket_mb: float, expected: list[int], pool: Pool
) -> None:
    settings = {"replicas": 2, "reduce": "backend", "bucket_mb": bucket_mb}
    case = Case(strategy="mirrored", settings=settings, global_size=16, micro_size=micro_size, num_steps=3)
    assert pool.run("tests.strategies.test_gradient_vector.counted", case, num_ranks=2) == [expected * 3] * 2


def reentrant(place: Place) -> str:
    """A layer that two reentrant checkpoints share: its gradient comes in two parts."""
    del place
    layer, last = nn.Linear(4, 4), nn.Linear(4, 4)
    params = [*layer.parameters(), *last.parameters()]
    reducer, hidden = BackendReducer(bucket_bytes=1), torch.ones(2, 4, requires_grad=True)
    reducer.begin(FlatBuffer([p.shape for p in params], torch.float32, CPU), num_shards=2)
    reducer.begin_backward(params, is_last=True)
    for _ in range(2):
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(TrainingError) as caught:
        last(hidden).sum().backward()
    reducer.close()
    return str(caught.value)


def test_a_gradient_that_comes_in_two_parts_is_refused_with_what_to_do(pool: Pool) -> None:
    for said in pool.run("tests.strategies.test_gradient_vector.reentrant", num_ranks=2, group=True):
        assert "Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0." in said


def sent_through_the_host(place: Place) -> list[float]:
    """The sum where tensors of a device do not travel to a single rank."""
    collective = GroupCollective(rank=place.rank, num_ranks=2, device=CPU)
    reducer, flat = vector.RingReducer(collective), torch.full((3,), 7.0 + place.rank)
    with mock.patch.object(vector, "sends_from_host", return_value=True):
        reducer.sum(flat)
    found: list[float] = flat.tolist()
    return found


def test_a_ring_of_tensors_that_gloo_cannot_send_goes_through_the_host(pool: Pool) -> None:
    found = pool.run("tests.strategies.test_gradient_vector.sent_through_the_host", num_ranks=2, group=True)
    assert found == [[15.0] * 3] * 2


def test_ranks_of_the_last_axis_are_neighbours_and_every_rank_has_coordinates_of_its_own() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert [axes.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert axes.coordinates(5) == {"replicate": 0, "shard": 2, "tensor": 1}
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert places == sorted(set(places))
    assert len(places) == 12
    (problem,) = axes.problems(6)
    assert "make 12 ranks, and the run has 6" in str(problem)
    assert axes.problems(12) == []


def limits(place: Place) -> list[float]:
    """The seconds that each group of some of four ranks waits for them in an exchange."""
    mesh = Axes(replicate=2, tensor=2).mesh("cpu", timeout_s=7)
    made = new_groups({"own": (0,), "tied": (0, 1)}, stages=2, replicas=2, rank=place.rank, timeout_s=8)
    groups = [mesh.get_group("replicate"), mesh.get_group("tensor"), made.replica, made.alike[0, 1]]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(pool: Pool) -> None:
    for found in pool.run("tests.strategies.test_gradient_vector.limits", num_ranks=4, group=True):
        assert found == [7.0, 7.0, 8.0, 8.0]


def test_an_attempt_does_not_find_the_signal_of_a_failed_exchange_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set("exception_dump", "0")
    monkeypatch.setattr(process_group, "HashStore", lambda: store)
    ranks = Mirrored(replicas=1, process_group="always").join(Identity.solo())
    ranks.close(failed=False)
    assert not store.check(["exception_dump"])
