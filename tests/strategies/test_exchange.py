"""The exchange of a step: how often, how much, and while what."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.contract.stepping import Case, run_rank
from tests.support import zoo
from tests.support.pool import Place, Pool
from tests.support.present import present
from trainkit.errors import TrainingError
from trainkit.strategies.groups import pairwise
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


@pytest.mark.parametrize("micro_size", [8, 2])
def test_a_step_is_one_exchange_however_many_shards_are_accumulated(micro_size: int, pool: Pool) -> None:
    settings = {"replicas": 2, "reduce": "backend"}
    case = Case(strategy="mirrored", settings=settings, global_size=16, micro_size=micro_size, num_steps=4)
    for sizes in pool.run("tests.strategies.test_exchange.counted", case, num_ranks=2):
        assert sizes == [PARAMETERS] * 4


def test_buckets_go_out_in_one_order_and_add_up_to_the_gradients(pool: Pool) -> None:
    # four parameters of 42, 7, 21 and 3 elements of 8 bytes; buckets of at least 160 bytes, from the last parameter on
    settings = {"replicas": 2, "bucket_mb": 160 / 2**20}
    case = Case(strategy="mirrored", settings=settings, global_size=16, micro_size=4, num_steps=3)
    for sizes in pool.run("tests.strategies.test_exchange.counted", case, num_ranks=2):
        assert sizes == [24, 49] * 3


class _Recorded(nn.Module):
    """Two layers; notes when the backward pass reaches its first."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.events = events

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden.register_hook(lambda grad: self.events.append("backward of the first layer"))
        outputs: Tensor = self.second(hidden)
        return outputs


def events_of_two_shards(place: Place) -> list[str]:
    del place
    events: list[str] = []
    model, reducer = _Recorded(events), BackendReducer(bucket_mb=1e-6)
    params = list(model.parameters())
    packing = FlatBuffer([p.shape for p in params], torch.float32, CPU)
    launch = reducer._launch

    def recorded(vector: Any, bucket: Any) -> None:
        events.append(f"exchange from {bucket.first}")
        launch(vector, bucket)

    reducer._launch = recorded  # type: ignore[method-assign]

    def partials() -> Any:
        for shard in range(2):
            reducer.begin_backward(params, is_last=shard == 1)
            model(torch.ones(2, 4)).sum().backward()
            reducer.end_backward()
        yield 0, [p.grad for p in params]

    sums = reducer.reduce(partials(), num_shards=4, packing=packing)
    assert torch.equal(present(sums[3]), torch.full((4,), 8.0))  # 2 samples, 2 shards, 2 ranks
    reducer.close()
    return events


def test_a_bucket_is_exchanged_while_backward_still_computes_earlier_layers(pool: Pool) -> None:
    for events in pool.run("tests.strategies.test_exchange.events_of_two_shards", num_ranks=2, group=True):
        assert events == [
            "backward of the first layer",
            "exchange from 3",
            "exchange from 2",
            "backward of the first layer",
            "exchange from 1",
            "exchange from 0",
        ]


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
    said = pool.run("tests.strategies.test_exchange.reentrant", num_ranks=2, group=True)
    text = (
        "a parameter got its gradient in two parts of one backward pass, as reentrant activation checkpointing does. "
        "Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0."
    )
    assert said == [text] * 2


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
