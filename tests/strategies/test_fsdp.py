"""A block that fsdp gathers twice, too late, or leaves out of the memory of the plan is caught here alone.

What fsdp refuses, what it gathers at once and in which order, what it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as of_torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.models.gpt import Gpt
from trainkit.models.resnet import ResNet
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.core.sharded import fully
from trainkit.strategies.core.sharded.base import unsharded_model_problems
from trainkit.strategies.core.sharded.fully import Sharding, blocks_of_model, fully_sharded, without_shared
from trainkit.strategies.fsdp.strategy import Fsdp

CPU = PlanContext()


def gpt(*, num_layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=num_layers, num_heads=2, width=8)


def refusals(facts: PlanContext = CPU, model: nn.Module | None = None, **settings: Any) -> list[str]:
    strategy = Fsdp(**settings)
    return [str(problem) for problem in strategy.validate(facts) or strategy.validate_model(model or gpt(), facts)]


class Halving(torch.optim.SGD):
    """A user's own rule, which looks at whole parameters and says so."""

    elementwise = False


REPRODUCIBLE = PlanContext(numerics=Numerics(reproducible=True))
REFUSED: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"replicas": 4, "replicate": 3}, CPU, "strategy.replicate=3", "must divide the 4 replicas."),
    ({"replicas": 4, "replicate": 4}, CPU, "strategy.replicate=4", "Use at most 2, or strategy=mirrored"),
    ({"wrap": ()}, CPU, "strategy.wrap=[]", "names no class"),
    ({"offload": True}, CPU, "strategy.offload=true", "the replicas are on the CPU"),
    ({"wrap": ("_Bloc",)}, CPU, "strategy.wrap=_Bloc", "Did you mean _Block?"),
    ({"replicas": 16}, REPRODUCIBLE, "numerics.reproducible=true", "summed part by part"),
    ({}, PlanContext(optimizer=torch.optim.Adafactor), "optimizer._target_=", "Adafactor uses whole parameters"),
    ({}, PlanContext(optimizer=Halving), "optimizer._target_=", "Halving uses whole parameters"),
]


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    for settings, facts, key, word in REFUSED:
        (said,) = refusals(facts, **settings)
        assert said.startswith(key)
        assert word in said
    assert refusals(PlanContext(num_gpus=4), offload=True, replicas=4) == []


def test_parameters_that_cannot_be_cut_are_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    model[1].empty = nn.Parameter(torch.empty(0))
    sparse, scale, empty = refusals(model=model)
    assert "0 has sparse gradients" in sparse
    assert "1.scale has no dims" in scale
    assert "1.empty has no elements" in empty


def test_blocks_are_gathered_by_themselves_and_tied_weights_with_the_model() -> None:
    model = gpt()
    assert list(without_shared(model, blocks_of_model(model))) == ["blocks.0", "blocks.1"]
    with torch.device("meta"):
        resnet = ResNet(depth=18)
    assert [*without_shared(resnet, blocks_of_model(resnet))][:4] == ["stem.0", "stem.1", "blocks.0", "blocks.1"]


def test_parameters_in_a_list_are_gathered_with_the_model_that_reads_them() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "list": nn.ParameterList([torch.ones(2)])})
    assert list(blocks_of_model(model)) == ["layer"]


def test_modules_of_torch_jit_are_refused_and_take_no_keys() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Dropout(0.5)))
    BlockKeys(model, seed=0, devices=[])
    assert "1 is a module of torch.jit" in unsharded_model_problems(model)[0].rule


def test_a_rank_holds_rows_and_gathers_a_block_and_the_next_one() -> None:
    model, strategy = gpt(num_layers=3), Fsdp(replicas=4)
    memory = strategy.estimate_memory(model, CPU)
    held = memory.resident
    assert held["embed.tokens.weight"] == 3 * 8
    assert held["blocks.0.mlp.expand.weight"] == 32 * 8 // 4
    block, rest = 12 * 8 * 8 + 2 * 8, 11 * 8 + 4 * 8 + 8
    assert memory.transient == rest + 4 * block
    halves = Fsdp(replicas=4, replicate=2).estimate_memory(model, CPU).resident
    assert halves["blocks.0.mlp.expand.weight"] == 32 * 8 // 2
    assert Fsdp(replicas=1).estimate_memory(model, CPU).transient == 0


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
