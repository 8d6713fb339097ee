"""A map of `auto` that fills one device more than another cut would is caught here alone.

Maps of a model over devices, and over the groups of devices of replicas: what their words name, how `auto` cuts, and
what is refused: replicas that overlap in a GPU, or spread over another host's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launchers.launches import launch_of
from trainkit.models.gpt import Gpt
from trainkit.numerics.precision import Precision
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import PlanContext
from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored
from trainkit.strategies.device_map import DeviceMap
from trainkit.strategies.maps.layout import (
    DeviceLayout,
    activation_bytes,
    activations_of,
    balanced,
    model_bytes,
    unit_bytes,
)
from trainkit.strategies.maps.syntax import assign, blocks_of
from trainkit.strategies.mesh.strategy import Pipeline

FACTS = PlanContext(num_gpus=4)
BLOCK_BYTES = 8 * (12 * 8 * 8 + 2 * 8)  # parameters and gradients of a block of width 8


def gpt(*, tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)
        if not tied:
            model.head.output.weight = nn.Parameter(torch.empty(11, 8))
    return model


def devices(strategy: DeviceMap, model: nn.Module, facts: PlanContext = FACTS) -> list[tuple[str, str]]:
    assert strategy.validate(facts) + strategy.validate_model(model, facts) == []
    return [(part.modules, part.device) for part in strategy.describe_partition(model, facts)]


def test_names_prefixes_ranges_and_rest_name_blocks() -> None:
    device_map: dict[str, int | str] = {"embed": 0, "blocks.0-1": 1, "blocks.2": 2, "rest": "cpu"}
    assert devices(DeviceMap(map=device_map), gpt(tied=False)) == [
        ("embed", "cuda:0"), ("blocks.0-1", "cuda:1"), ("blocks.2", "cuda:2"), ("blocks.3, head", "cpu"),
    ]  # fmt: skip
    assert devices(DeviceMap(map={"blocks": "/gpu:1", "rest": 0}), gpt()) == [
        ("embed", "cuda:0"), ("blocks.0-3", "cuda:1"), ("head", "cuda:0"),
    ]  # fmt: skip


LIMIT = 1.5 * BLOCK_BYTES / 2**30
REFUSED: list[tuple[Any, dict[str, Any], list[tuple[str, str]]]] = [
    ({"embd": 0, "rest": 1}, {}, [("map.embd=0", "no such module. Did you mean embed?")]),
    ({"q": 0, "rest": 1}, {}, [("map.q=0", "There are: embed, blocks.0-3, head.")]),
    ({"blocks.0-7": 0, "rest": 1}, {}, [("map.blocks.0-7=0", "there are blocks.0-3")]),
    ({"block.0-3": 0, "rest": 1}, {}, [("map.block.0-3=0", "Did you mean blocks.0-3?")]),
    ({"blocks.3-0": 0, "rest": 1}, {}, [("map.blocks.3-0=0", "Write blocks.0-3.")]),
    ({"blocks.1.mlp": 0, "rest": 1}, {}, [("map.blocks.1.mlp=0", "lies inside the block blocks.1")]),
    ({"blocks.0-2": 0, "blocks.2-3": 1, "rest": 0}, {}, [("map.blocks.2-3=1", "blocks.2 is in blocks.0-2 already")]),
    ({"embed": 0, "blocks": 0, "head": 0, "rest": 1}, {}, [("map.rest=1", "names nothing")]),
    ({"embed": 0, "blocks.0-2": 0, "head": 0}, {}, [("map", "and 1 more. Add blocks.3: DEVICE")]),
    ({"embed": 0, "rest": 1}, {}, [("map.rest=1", "put head on 0 too")]),
    ({"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": "cuda:0", "blocks.3": 1, "head": 0}, {},
     [("map", "4 times on the way through the model, and 2 would suffice")]),
    ({}, {}, [("map={}", "places nothing")]),
    ({"embed": 4, "blocks": "gpu:x", "rest": 0}, {},
     [("map.embed=4", "this host has 4"), ("map.blocks=gpu:x", "not the name of a device")]),
    ({"rest": 0}, {"devices": (0, 1)}, [("devices=[0, 1]", "no effect with strategy.map")]),
    ("auto", {"devices": ()}, [("devices=[]", "names no device")]),
    ("auto", {"devices": (0,), "max_memory": {"1": 3, "0": -1}},
     [("max_memory.1=3", "there are cuda:0."), ("max_memory.0=-1", "more than 0")]),
    ("auto", {"devices": (0, 1, 2), "max_memory": LIMIT},
     [(f"max_memory={LIMIT}", "needs 2.43e-05 GiB"), (f"max_memory={LIMIT}", "blocks.0, 5.84e-06 GiB"),
      (f"max_memory={LIMIT}", "take 2.63e-05 GiB")]),
    ({"blocks.0-1": 1, "rest": 0}, {"max_memory": {"1": LIMIT}},
     [(f"max_memory={{1:{LIMIT}}}", "takes 8.76e-06 GiB, and strategy.map puts 1.17e-05 GiB")]),
]  # fmt: skip


def test_what_cannot_be_placed_is_refused() -> None:
    for device_map, settings, expected in REFUSED:
        strategy = DeviceMap(map=device_map, **settings)
        texts = [str(problem) for problem in strategy.validate(FACTS) or strategy.validate_model(gpt(), FACTS)]
        assert len(texts) == len({key for key, _ in expected}), texts
        for key, word in expected:
            assert [text for text in texts if text.startswith(f"strategy.{key}: ") and word in text], (key, texts)


def test_processes_that_have_nothing_to_do_are_refused() -> None:
    (problem,) = DeviceMap().validate(PlanContext(launch=launch_of(2)))
    assert "torchrun started 2 processes, and a device map has work for one" in str(problem)


def test_auto_balances_bytes_and_keeps_tied_weights_together() -> None:
    assert devices(DeviceMap(), gpt(tied=False), PlanContext(num_gpus=2)) == [
        ("embed, blocks.0-1", "cuda:0"), ("blocks.2-3, head", "cuda:1"),
    ]  # fmt: skip
    assert devices(DeviceMap(devices=(3, 1)), gpt()) == [
        ("embed, blocks.0-1", "cuda:3"), ("blocks.2-3", "cuda:1"), ("head", "cuda:3"),
    ]  # fmt: skip
    assert devices(DeviceMap(), gpt(), PlanContext()) == [("embed, blocks.0-3, head", "cpu")]
    little = {"0": 2 * BLOCK_BYTES / 2**30}
    assert devices(DeviceMap(devices=(0, 1), max_memory=little), gpt(tied=False))[0] == ("embed, blocks.0", "cuda:0")


def test_the_fullest_place_holds_as_little_as_any_cut_allows() -> None:
    sizes, none = [3, 1, 4, 1, 5, 9, 2, 6], [math.inf] * 3
    assert balanced(sizes, none, leaders=list(range(8))) == [0, 0, 0, 0, 0, 1, 1, 2]  # 14, 11, 6
    assert balanced(sizes, none, leaders=[0, 1, 2, 3, 4, 5, 6, 0]) == [0, 0, 1, 1, 1, 2, 2, 0]  # 10, 10, 11
    assert balanced(sizes, [14, 14, 2], leaders=list(range(8))) is None


def test_a_layer_list_inside_a_top_level_child_is_cut_and_what_is_left_stays_together() -> None:
    inner = nn.Module()
    inner.wte, inner.h, inner.norm = nn.Embedding(3, 2), nn.ModuleList([nn.Linear(2, 2)] * 1), nn.LayerNorm(2)
    model = nn.Module()
    model.transformer, model.head = inner, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    units = blocks_of(model)
    assert [unit.name for unit in units] == ["transformer", "transformer.h.0", "head.0", "head.1"]
    names = ["transformer.wte.weight", "transformer.norm.weight", "transformer.norm.bias"]
    assert [name for name, _ in units[0].tensors()] == names
    assert units[0].entries == (inner, inner.wte, inner.norm)
    device_map = {"transformer": 0, "transformer.h.0": 1, "head": 2}
    assert assign(model, units, device_map).places == (0, 1, 2, 2)
    assert assign(model, units, dict(reversed(device_map.items()))).places == (0, 1, 2, 2)


def test_what_the_model_itself_owns_is_placed_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    model.register_buffer("mean", torch.ones(2))
    units = blocks_of(model)
    assert [[name for name, _ in unit.tensors()] for unit in units] == [["scale"], ["mean"], ["0.weight", "0.bias"]]
    assert assign(model, units, {"scale": 0, "rest": 1}).places == (0, 1, 1)


def test_bytes_are_those_of_what_is_trained_and_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(1, affine=False), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert unit_bytes(blocks_of(model), model_bytes(Precision())) == [9 * 8, 2 * 4 + 8, 0]
    model[0].weight.requires_grad = False
    assert unit_bytes(blocks_of(model), model_bytes(Precision(value="fp64")))[0] == 9 * 8


class Nested(nn.Module):
    """Takes and gives tensors inside tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, pair: tuple[Tensor, int], *, more: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"both": (pair[0] * self.weight + more["x"], pair[1])}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Nested(), Nested()

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, int]]:
        out: dict[str, tuple[Tensor, int]] = self.second(self.first((x, 7), more={"x": x})["both"], more={"x": x})
        return out


def test_activations_are_brought_to_each_block_however_deep_they_lie() -> None:
    model = Caller()
    model.second.to("meta")
    layout = DeviceLayout(units=blocks_of(model), group=("cpu", "meta"), places=(0, 1), routed=True)
    layout.move(model)
    assert [param.device.type for param in model.parameters()] == ["cpu", "meta"]
    tensor, number = model(torch.ones(2))["both"]
    assert (tensor.device.type, number, layout.device.type) == ("meta", 7, "meta")


def test_activations_are_those_that_each_block_keeps_for_backward() -> None:
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 3, bias=False))
    shard = torch.empty(10, 6, device="meta")
    sizes = [
        activation_bytes(model, blocks_of(model), lambda run: run(shard).sum(), Precision(value=value))
        for value in ("fp32", "fp64")
    ]
    # the inputs of the first; what tanh gave, which is the input of the last as well
    assert sizes == [[10 * 6 * 4, 10 * 100 * 4, 0], [10 * 6 * 8, 10 * 100 * 8, 0]]
    assert {param.device.type for param in model.parameters()} == {"cpu"}


def test_a_model_that_looks_at_numbers_has_no_known_activations() -> None:
    model, shard = nn.Sequential(nn.Linear(2, 2)), torch.empty(1, 2, device="meta")
    assert activation_bytes(model, blocks_of(model), lambda run: run(shard).sum().item(), Precision()) is None


def test_planning_finds_the_activations_of_a_model_once_for_each_size_of_a_shard() -> None:
    model, sizes = nn.Sequential(nn.Linear(2, 2)), list[int]()
    model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    facts = PlanContext(objective=Classification(), sample=(torch.zeros(2), 1), micro_size=3)
    contexts = (facts, facts, replace(facts, micro_size=5))
    first, again, larger = (activations_of(model, blocks_of(model), context, Precision()) for context in contexts)
    assert first is not None
    assert larger is not None
    assert again == first < larger
    assert sizes == [3, 5]


def test_auto_weighs_the_activations_of_a_shard() -> None:
    narrow = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False), *narrow)
    alone = PlanContext(num_gpus=2)
    sampled = replace(alone, micro_size=4096, objective=Classification(), sample=(torch.zeros(8), 1))
    for strategy, first in ((DeviceMap(), "cuda:0"), (Pipeline(stages=2), 0)):
        maps: list[Any] = [strategy.resolve(lambda: model, facts).map for facts in (alone, sampled)]
        assert [list(device_map.values()).count(first) for device_map in maps] == [1, 2]
    assert [part.modules for part in DeviceMap().describe_partition(model, sampled)] == ["0-1", "2-5"]


NONE = PlanContext()
SPLIT = {"embed": 0, "rest": 1}


def task_devices(strategy: Mirrored | MultiWorkerMirrored, context: PlanContext) -> list[str]:
    assert strategy.validate(context) == []
    return [task.device for task in strategy.tasks(context)]


@pytest.mark.parametrize(("settings", "context", "expected"), [
    ({"map": SPLIT}, FACTS, ["cuda:0", "cuda:2"]),
    ({"map": "auto", "replicas": 1}, FACTS, ["cuda:0"]),
    ({"map": "auto", "devices": ((3, 1), ("/gpu:2", 0))}, FACTS, ["cuda:3", "cuda:2"]),
    ({"map": "auto", "devices": (("cpu", 1), ("cpu", "/gpu:0"))}, FACTS, ["cuda:1", "cuda:0"]),
    ({"map": "auto", "devices": (("cpu", "cpu"),) * 3}, NONE, ["cpu"] * 3),
    ({"map": SPLIT}, NONE, ["cpu", "cpu"]),
])  # fmt: skip
def test_a_replica_takes_neighbouring_gpus_or_those_named_and_its_task_the_first(
    settings: Any, context: PlanContext, expected: list[str]
) -> None:
    assert task_devices(Mirrored(**settings), context) == expected


def test_the_processes_of_a_launch_have_a_group_each() -> None:
    launch = launch_of(4, rank=3, local_rank=1, num_local=2, num_hosts=2)
    context = PlanContext(launch=launch, num_gpus=4)
    strategy = MultiWorkerMirrored(map="auto")
    assert task_devices(strategy, context)[3] == "cuda:2"
    assert strategy.num_replicas(context) == 4
    assert task_devices(MultiWorkerMirrored(map="auto", devices=((3, 2), (1, 0))), context)[3] == "cuda:1"
    alone = launch_of(2, rank=1, num_local=1, num_hosts=2, takes_devices=True)
    assert (
        task_devices(MultiWorkerMirrored(map=SPLIT), PlanContext(launch=alone, num_gpus=4)) == ["cuda:0", "cuda:2"] * 2
    )


REFUSED_REPLICAS: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"devices": ((0, 1), (2, 3))}, FACTS, "devices=[[0, 1], [2, 3]]", "Add strategy.map=auto."),
    ({"devices": (0, 1), "map": "auto"}, FACTS, "devices=[0, 1]", "a group of devices for each replica"),
    ({"devices": ((0, 1), (1, 2)), "map": "auto"}, FACTS, "devices=[[0, 1], [1, 2]]", "names cuda:1 twice"),
    ({"devices": ((0, 1), (2, "cpu")), "map": "auto"}, FACTS, "devices=[[0, 1], [2, 'cpu']]", "the same devices"),
    ({"map": {}}, FACTS, "map={}", "places nothing"),
    ({"map": {"embed": "cuda:1", "rest": 0}}, FACTS, "map.embed=cuda:1", "strategy.devices names the devices"),
    ({"map": {"embed": 0, "rest": 2}, "devices": ((0, 1), (2, 3))}, FACTS, "map.rest=2", "no such place"),
    ({"map": "auto"}, FACTS, "map=auto", "Name the groups"),
    ({"map": SPLIT, "replicas": 3}, FACTS, "map", "need 6, and this host has 4 GPUs"),
    ({"map": SPLIT, "compression": "powersgd"}, FACTS, "compression=powersgd", "Use bf16 or none"),
    ({"map": SPLIT, "replicas": 2, "reduce": "shared_memory"}, FACTS, "reduce=shared_memory", "on GPUs"),
    ({"map": "auto", "replicas": 2}, NONE, "map=auto", "has no GPU to spread a replica over"),
    ({"map": "auto", "devices": (("cpu", "cpu"),) * 2}, PlanContext(launch=launch_of(3)),
     "devices=[['cpu', 'cpu'], ['cpu', 'cpu']]", "torchrun started 3 processes"),
]  # fmt: skip


def test_what_does_not_go_together_is_refused() -> None:
    for settings, context, key, word in REFUSED_REPLICAS:
        (problem,) = Mirrored(**settings).validate(context)
        assert str(problem).startswith(f"strategy.{key}: ")
        assert word in str(problem)


def test_tied_weights_in_two_places_are_refused_and_auto_keeps_them_together() -> None:
    (problem,) = Mirrored(map=SPLIT).validate_model(gpt(), FACTS)
    assert "put head on 0 too" in str(problem)
    resolved = Mirrored(map="auto", replicas=2).resolve(gpt, FACTS)
    assert resolved.devices == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert isinstance(resolved.map, dict)
    assert resolved.map["embed"] == resolved.map["head"]
    assert set(resolved.map.values()) == {0, 1}


def test_the_plan_counts_a_part_for_each_device_of_a_replica() -> None:
    model, strategy = gpt(), Mirrored(map={"embed": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 0})
    first, second = strategy.replica_parts(model, FACTS)
    names = {name for name, _ in model.named_parameters() if name.startswith(("blocks.2", "blocks.3"))}
    assert set(second.memory.resident) == names
    assert first.memory.resident.keys().isdisjoint(second.memory.resident)
    assert first.memory.gradient_copies == 1  # the vectors of the exchange
    assert strategy.estimate_memory(model, FACTS) == first.memory
    parts = strategy.describe_partition(model, FACTS)
    assert [(part.modules, part.device) for part in parts] == [
        ("embed, blocks.0-1", "cuda:0, cuda:2"), ("blocks.2-3", "cuda:1, cuda:3"), ("head", "cuda:0, cuda:2"),
    ]  # fmt: skip


def test_a_job_takes_all_devices_its_groups_blocks_are_compiled_and_one_replica_is_worth_a_proof() -> None:
    mapped = Mirrored(map=SPLIT)
    assert (mapped.num_slots(4), mapped.num_slots(0), Mirrored(replicas=3).num_slots(4)) == (4, 2, 3)
    assert (mapped.facts_in(NONE).compiles, mapped.facts_in(NONE).compiles_step) == ("blocks", False)
    assert Mirrored().facts_in(NONE) == Mirrored.facts
    assert Mirrored(map={"rest": 0}, replicas=1).proof_problems(NONE) == []
    assert len(Mirrored(replicas=1).proof_problems(NONE)) == 1
