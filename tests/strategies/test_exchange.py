"""Gradients that are exchanged once a shard instead of once a step are caught here alone.

Groups of ranks and what they exchange; a group of some ranks waits no longer than the group of all.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from tests.contract.stepping import Case, run_rank
from tests.support import zoo
from tests.support.pool import Place, Pool
from trainkit.cluster.tasks import Identity
from trainkit.errors import TrainingError
from trainkit.strategies.data_parallel import Mirrored
from trainkit.strategies.groups import pairwise, process_group
from trainkit.strategies.groups.mesh import Axes
from trainkit.strategies.pipeline.groups import new_groups
from trainkit.strategies.reducers import BackendReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
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
    assert pool.run("tests.strategies.test_exchange.counted", case, num_ranks=2) == [expected * 3] * 2


def reentrant(place: Place) -> str:
    """A layer that two reentrant checkpoints share: its gradient comes in two parts."""
    del place
    layer, last = nn.Linear(4, 4), nn.Linear(4, 4)
    params = [*layer.parameters(), *last.parameters()]
    reducer = BackendReducer(bucket_mb=1e-6)

    def partials() -> Any:
        reducer.begin_backward(params, is_last=True)
        hidden = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        last(hidden).sum().backward()
        yield 0, [p.grad for p in params]

    packing = FlatBuffer([p.shape for p in params], torch.float32, CPU)
    with pytest.raises(TrainingError) as caught:
        reducer.reduce(partials(), num_shards=2, packing=packing)
    reducer.close()
    return str(caught.value)


def test_a_gradient_that_comes_in_two_parts_is_refused_with_what_to_do(pool: Pool) -> None:
    for said in pool.run("tests.strategies.test_exchange.reentrant", num_ranks=2, group=True):
        assert "Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0." in said


def test_a_reducer_that_has_not_the_step_sends_nothing() -> None:
    reducer = BackendReducer(bucket_mb=1e-6)  # no process group: an exchange would raise
    model = nn.Linear(2, 2)
    reducer.begin_backward(list(model.parameters()), is_last=True)
    model(torch.ones(1, 2)).sum().backward()
    reducer.end_backward()
    assert not model.weight._post_accumulate_grad_hooks


def sent_through_the_host(place: Place) -> list[float]:
    """The numbers that a rank receives where tensors of its device do not travel; an empty tensor is left out."""
    received, peer = torch.zeros(3), 1 - place.rank
    with mock.patch.object(pairwise, "needs_host", return_value=True) as asked:
        pairwise.exchange([(peer, torch.full((3,), 7.0 + place.rank)), (peer, torch.empty(0))], [(peer, received)])
    assert asked.call_count == 2
    found: list[float] = received.tolist()
    return found


def test_tensors_that_gloo_cannot_send_arrive_by_a_copy_on_the_host(pool: Pool) -> None:
    found = pool.run("tests.strategies.test_exchange.sent_through_the_host", num_ranks=2, group=True)
    assert found == [[8.0] * 3, [7.0] * 3]


def test_ranks_of_the_last_axis_are_neighbours_and_every_rank_has_coordinates_of_its_own() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert [axes.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert axes.coordinates(5) == {"replicate": 0, "shard": 2, "tensor": 1}
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert places == sorted(set(places))
    assert len(places) == 12


def test_axes_that_do_not_make_up_the_world_are_a_problem() -> None:
    assert Axes(shard=2, tensor=2).problems(4) == []
    (problem,) = Axes(shard=2, tensor=2).problems(6)
    assert "make 4 ranks, and the run has 6" in str(problem)


def limits(place: Place) -> list[float]:
    """The seconds that each group of some of four ranks waits for them in an exchange."""
    mesh = Axes(replicate=2, tensor=2).mesh("cpu", timeout_s=7)
    made = new_groups({"own": (0,), "tied": (0, 1)}, stages=2, replicas=2, rank=place.rank, timeout_s=8)
    groups = [mesh.get_group("replicate"), mesh.get_group("tensor"), made.replica, made.alike[0, 1]]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(pool: Pool) -> None:
    assert pool.run("tests.strategies.test_exchange.limits", num_ranks=4, group=True) == [[7.0, 7.0, 8.0, 8.0]] * 4


def test_an_attempt_does_not_find_the_signal_of_a_failed_exchange_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set("exception_dump", "0")
    monkeypatch.setattr(process_group, "HashStore", lambda: store)
    ranks = Mirrored(replicas=1, process_group="always").join(Identity.solo())
    ranks.close(failed=False)
    assert not store.check(["exception_dump"])
