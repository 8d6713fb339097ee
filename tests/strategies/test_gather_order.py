"""A block that fsdp gathers twice, or only when it is needed, is caught here alone: in a group of one real rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as of_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.numerics.precision import Precision
from trainkit.strategies.core.sharded import fully
from trainkit.strategies.core.sharded.fully import Sharding, fully_sharded


class Deep(nn.Module):
    """A layer, eight blocks, and a head; the blocks are called in an order."""

    def __init__(self, order: list[int], events: list[str]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(8))
        self.order, self.events = order, events

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for number in self.order:
            hidden = self.blocks[number](hidden)
            hidden.register_hook(lambda _grad, number=number: self.events.append(f"backward {number}"))
            self.events.append(f"forward {number}")
        outputs: Tensor = self.head(hidden)
        return outputs


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def events_of_a_step(order: list[int], monkeypatch: pytest.MonkeyPatch, *, prefetches: bool = False) -> list[str]:
    """What the second step gathers and computes."""
    events: list[str] = []
    model = Deep(order, events)
    gather, in_order = of_torch.foreach_all_gather, fully.gather_in_order  # type: ignore[attr-defined]

    def recorded(params: Any, *args: Any, **options: Any) -> Any:
        events.append("gather " + params[0]._param_fqn.rpartition(".0.")[0].removeprefix("blocks."))
        return gather(params, *args, **options)

    monkeypatch.setattr(fully, "gather_in_order", lambda model, **_: in_order(model, prefetches=prefetches))
    mesh, device = init_device_mesh("cpu", (8,)), torch.device("cpu")
    sharding = Sharding(mesh=mesh, device=device, precision=Precision(value="fp32"))
    fully_sharded(model, model.blocks, sharding)
    monkeypatch.setattr(of_torch, "foreach_all_gather", recorded)
    for _ in range(2):
        events.clear()
        model(torch.ones(2, 8)).sum().backward()
    return events


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("prefetches", [False, True])
def test_each_block_is_gathered_once_a_direction_in_the_order_of_the_calls(
    prefetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [3, 1, 0, 2, 7, 5, 4, 6]
    events = events_of_a_step(order, monkeypatch, prefetches=prefetches)
    gathers = [one for one in events if one.startswith("gather")]
    names = ["gather ", *(f"gather {number}" for number in order)]
    assert gathers == [*names, *names[-2:0:-1]], "the rest and the last block stay gathered"


@pytest.mark.usefixtures("eight")
def test_with_streams_a_gather_begins_while_the_block_before_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_step([*range(8)], monkeypatch, prefetches=True)
    for number in range(1, 8):
        assert events.index(f"gather {number}") < events.index(f"forward {number - 1}")
    backward = events[events.index("backward 7") :]
    assert "gather 6" in events[events.index("forward 7") : events.index("backward 7")], "begun by the head"
    for number in range(6):
        assert backward.index(f"gather {number}") < backward.index(f"backward {number + 1}") + 2
