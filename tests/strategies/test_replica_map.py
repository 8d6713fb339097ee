"""Replicas that overlap in a GPU, or spread over another host's, are caught here alone.

Groups of devices and the map over them: what they come to, and what is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.launchers.launches import launch_of
from trainkit.cluster.tasks import Identity, Task
from trainkit.models.gpt import Gpt
from trainkit.strategies.base import PlanContext
from trainkit.strategies.capabilities import proof_problems, traits_here
from trainkit.strategies.data_parallel import Mirrored, MultiWorkerMirrored
from trainkit.strategies.memory_capabilities import num_slots, replica_parts

NONE, FOUR = PlanContext(), PlanContext(num_gpus=4)
SPLIT = {"embed": 0, "rest": 1}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def devices(strategy: Mirrored | MultiWorkerMirrored, context: PlanContext) -> list[str]:
    assert strategy.validate(context) == []
    return [task.device for task in strategy.tasks(context)]


@pytest.mark.parametrize(("settings", "context", "expected"), [
    ({"map": SPLIT}, FOUR, ["cuda:0", "cuda:2"]),
    ({"map": "auto", "replicas": 1}, FOUR, ["cuda:0"]),
    ({"map": "auto", "devices": ((3, 1), ("/gpu:2", 0))}, FOUR, ["cuda:3", "cuda:2"]),
    ({"map": "auto", "devices": (("cpu", 1), ("cpu", "/gpu:0"))}, FOUR, ["cuda:1", "cuda:0"]),
    ({"map": "auto", "devices": (("cpu", "cpu"),) * 3}, NONE, ["cpu"] * 3),
    ({"map": SPLIT}, NONE, ["cpu", "cpu"]),
])  # fmt: skip
def test_a_replica_takes_neighbouring_gpus_or_those_named_and_its_task_the_first(
    settings: Any, context: PlanContext, expected: list[str]
) -> None:
    assert devices(Mirrored(**settings), context) == expected


def test_the_processes_of_a_launch_have_a_group_each() -> None:
    launch = launch_of(4, rank=3, local_rank=1, num_local=2, num_hosts=2)
    context = PlanContext(launch=launch, num_gpus=4)
    strategy = MultiWorkerMirrored(map="auto")
    assert devices(strategy, context)[3] == "cuda:2"
    assert strategy.num_replicas(context) == 4
    assert devices(MultiWorkerMirrored(map="auto", devices=((3, 2), (1, 0))), context)[3] == "cuda:1"
    alone = launch_of(2, rank=1, num_local=1, num_hosts=2, takes_devices=True)
    assert devices(MultiWorkerMirrored(map=SPLIT), PlanContext(launch=alone, num_gpus=4)) == ["cuda:0", "cuda:2"] * 2


REFUSED: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"devices": ((0, 1), (2, 3))}, FOUR, "devices=[[0, 1], [2, 3]]", "Add strategy.map=auto."),
    ({"devices": (0, 1), "map": "auto"}, FOUR, "devices=[0, 1]", "a group of devices for each replica"),
    ({"devices": ((0, 1), (1, 9)), "map": "auto"}, FOUR, "devices=9", "no such GPU"),
    ({"devices": ((0, 1), (1, 2)), "map": "auto"}, FOUR, "devices=[[0, 1], [1, 2]]", "names cuda:1 twice"),
    ({"devices": ((0, 1), (2, "cpu")), "map": "auto"}, FOUR, "devices=[[0, 1], [2, 'cpu']]", "the same devices"),
    ({"map": {}}, FOUR, "map={}", "places nothing"),
    ({"map": {"embed": "cuda:1", "rest": 0}}, FOUR, "map.embed=cuda:1", "strategy.devices names the devices"),
    ({"map": {"embed": 0, "rest": 2}, "devices": ((0, 1), (2, 3))}, FOUR, "map.rest=2", "no such place"),
    ({"map": "auto"}, FOUR, "map=auto", "Name the groups"),
    ({"map": SPLIT, "replicas": 3}, FOUR, "map", "need 6, and this host has 4 GPUs"),
    ({"map": SPLIT, "compression": "powersgd"}, FOUR, "compression=powersgd", "Use bf16 or none"),
    ({"map": SPLIT, "replicas": 2, "reduce": "shared_memory"}, FOUR, "reduce=shared_memory", "on GPUs"),
    ({"map": "auto", "replicas": 2}, NONE, "map=auto", "has no GPU to spread a replica over"),
    ({"map": "auto", "devices": (("cpu", "cpu"),) * 2}, PlanContext(launch=launch_of(3)),
     "devices=[['cpu', 'cpu'], ['cpu', 'cpu']]", "torchrun started 3 processes"),
]  # fmt: skip


def test_what_does_not_go_together_is_refused() -> None:
    for settings, context, key, word in REFUSED:
        (problem,) = Mirrored(**settings).validate(context)
        assert str(problem).startswith(f"strategy.{key}: ")
        assert word in str(problem)


def test_tied_weights_in_two_places_are_refused_and_auto_keeps_them_together() -> None:
    (told,) = Mirrored(map=SPLIT).validate_model(gpt(), FOUR)
    assert "put head on 0 too" in str(told)
    resolved = Mirrored(map="auto", replicas=2).resolve(gpt, FOUR)
    assert resolved.devices == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert isinstance(resolved.map, dict)
    assert resolved.map["embed"] == resolved.map["head"]
    assert set(resolved.map.values()) == {0, 1}


def test_the_plan_counts_a_part_for_each_device_of_a_replica() -> None:
    model, strategy = gpt(), Mirrored(map={"embed": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 0})
    first, second = replica_parts(strategy, model, FOUR, num_shards=1)
    names = {name for name, _ in model.named_parameters() if name.startswith(("blocks.2", "blocks.3"))}
    assert set(second.memory.resident) == names
    assert first.memory.resident.keys().isdisjoint(second.memory.resident)
    assert first.memory.gradient_copies == 1  # the vectors of the exchange
    assert strategy.estimate_memory(model, FOUR) == first.memory
    parts = strategy.describe_partition(model, FOUR)
    assert [(part.modules, part.device) for part in parts] == [
        ("embed, blocks.0-1", "cuda:0, cuda:2"), ("blocks.2-3", "cuda:1, cuda:3"), ("head", "cuda:0, cuda:2"),
    ]  # fmt: skip


def test_a_job_takes_all_devices_of_its_groups_blocks_are_compiled_and_one_replica_is_worth_a_proof() -> None:
    mapped = Mirrored(map=SPLIT)
    assert (num_slots(mapped, 4), num_slots(mapped, 0), num_slots(Mirrored(replicas=3), 4)) == (4, 2, 3)
    assert (traits_here(mapped).compiles, traits_here(mapped).compiles_step) == ("blocks", False)
    assert traits_here(Mirrored()) == Mirrored.traits
    assert proof_problems(Mirrored(map={"rest": 0}, replicas=1), NONE) == []
    assert len(proof_problems(Mirrored(replicas=1), NONE)) == 1


def test_nccl_is_bound_to_no_gpu_where_a_rank_exchanges_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **named: given.append(named["device_id"]))
    task = Task(role="worker", index=0, rank=0, device="cuda:0")
    identity = Identity(task=task, num_ranks=1, store=None, prefix="0", token="of this test")
    for settings in ({}, {"map": SPLIT}, {"map": "auto", "devices": ((0, "cpu"),)}):
        strategy = Mirrored(process_group="always", **settings)
        found = strategy._replica_map(FOUR)
        strategy.join(identity, exchanges_on_gpus=found is not None and found.spans_gpus)
    assert given == [torch.device("cuda:0"), None, torch.device("cuda:0")]
