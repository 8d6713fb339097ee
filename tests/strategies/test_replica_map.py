"""Groups of devices and the map over them: what they come to, and every mistake in its exact words."""

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

FOUR = PlanContext(num_gpus=4)
HALVES = {"embed": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 0}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=4, num_heads=2, width=8)


def refusals(context: PlanContext = FOUR, **settings: Any) -> list[str]:
    return [str(problem) for problem in Mirrored(**settings).validate(context)]


def devices(strategy: Mirrored | MultiWorkerMirrored, context: PlanContext) -> list[str]:
    assert strategy.validate(context) == []
    return [task.device for task in strategy.tasks(context)]


def test_a_replica_takes_neighbouring_gpus_or_those_that_are_named() -> None:
    assert devices(Mirrored(map={"embed": 0, "rest": 1}), FOUR) == ["cuda:0", "cuda:2"]
    assert devices(Mirrored(map="auto", replicas=1), FOUR) == ["cuda:0"]
    assert devices(Mirrored(map="auto", devices=((3, 1), ("/gpu:2", 0))), FOUR) == ["cuda:3", "cuda:2"]


def test_a_task_has_the_first_gpu_of_its_group() -> None:
    assert devices(Mirrored(map="auto", devices=(("cpu", 1), ("cpu", "/gpu:0"))), FOUR) == ["cuda:1", "cuda:0"]
    assert devices(Mirrored(map="auto", devices=(("cpu", "cpu"),) * 3), PlanContext()) == ["cpu"] * 3
    assert devices(Mirrored(map={"embed": 0, "rest": 1}), PlanContext()) == ["cpu", "cpu"]


def test_the_processes_of_a_launch_have_a_group_each() -> None:
    launch = launch_of(4, rank=3, local_rank=1, num_local=2, num_hosts=2)
    context = PlanContext(launch=launch, num_gpus=4)
    strategy = MultiWorkerMirrored(map="auto")
    assert devices(strategy, context)[3] == "cuda:2"
    assert strategy.num_replicas(context) == 4
    assert devices(MultiWorkerMirrored(map="auto", devices=((3, 2), (1, 0))), context)[3] == "cuda:1"
    alone = launch_of(2, rank=1, num_local=1, num_hosts=2, takes_devices=True)
    taken = MultiWorkerMirrored(map={"embed": 0, "rest": 1})
    assert devices(taken, PlanContext(launch=alone, num_gpus=4)) == ["cuda:0", "cuda:2"] * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"devices": ((0, 1), (2, 3))},
            (
                "strategy.devices=[[0, 1], [2, 3]]: names a group of devices for a replica, and no map spreads it over "
                "them. Add strategy.map=auto."
            ),
        ),
        (
            {"devices": (0, 1), "map": "auto"},
            (
                "strategy.devices=[0, 1]: must name a group of devices for each replica where strategy.map is set: "
                "strategy.devices=[[0,1],[2,3]]."
            ),
        ),
        (
            {"devices": ((0, 1), (1, 9)), "map": "auto"},
            "strategy.devices=9: no such GPU: this host has 4, counted from 0.",
        ),
        (
            {"devices": ((0, 1), (1, 2)), "map": "auto"},
            "strategy.devices=[[0, 1], [1, 2]]: names cuda:1 twice. A GPU is in one place of one replica.",
        ),
        (
            {"devices": ((0, 1), (2, "cpu")), "map": "auto"},
            (
                "strategy.devices=[[0, 1], [2, 'cpu']]: has a group of cuda, cuda and one of cuda, cpu. Replicas have "
                "the same devices, in the same order: one map serves all."
            ),
        ),
        ({"map": {}}, "strategy.map={}: places nothing. Name modules and their places, {embed:0,rest:1}, or use auto."),
        (
            {"map": {"embed": "cuda:1", "rest": 0}},
            (
                "strategy.map.embed=cuda:1: must be a place in a replica's group of devices, counted from 0: "
                "strategy.devices names the devices."
            ),
        ),
        (
            {"map": {"embed": 0, "rest": 2}, "devices": ((0, 1), (2, 3))},
            "strategy.map.rest=2: no such place: a replica has 2 devices, counted from 0.",
        ),
        (
            {"map": "auto"},
            (
                "strategy.map=auto: spreads each replica over a group of GPUs, whose size is open. Name the groups, "
                "strategy.devices=[[0,1],[2,3]], or replicas."
            ),
        ),
        (
            {"map": {"embed": 0, "rest": 1}, "replicas": 3},
            (
                "strategy.map: 3 replicas of 2 devices need 6, and this host has 4 GPUs. Use fewer replicas, or name "
                "devices: strategy.devices=[[0,1],[2,3]]."
            ),
        ),
        (
            {"map": {"embed": 0, "rest": 1}, "compression": "powersgd"},
            (
                "strategy.compression=powersgd: compresses all gradients of a replica at once, and strategy.map "
                "distributes them. Use bf16 or none."
            ),
        ),
        (
            {"map": {"embed": 0, "rest": 1}, "replicas": 2, "reduce": "shared_memory"},
            "strategy.reduce=shared_memory: sums in the memory of the host, and the replicas are on GPUs. Use backend.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], said: str) -> None:
    assert refusals(**settings) == [said]


def test_a_host_without_gpus_and_a_launch_of_other_groups_are_refused() -> None:
    assert refusals(PlanContext(), map="auto", replicas=2) == [
        (
            "strategy.map=auto: has no GPU to spread a replica over. Name the devices: "
            "strategy.devices=[[cpu,cpu],[cpu,cpu]]."
        )
    ]
    launched = PlanContext(launch=launch_of(3))
    assert refusals(launched, map="auto", devices=(("cpu", "cpu"),) * 2) == [
        (
            "strategy.devices=[['cpu', 'cpu'], ['cpu', 'cpu']]: names 2 groups, and torchrun started 3 processes on "
            "this host, a replica each. Name as many groups."
        )
    ]


def test_tied_weights_in_two_places_are_refused_and_auto_keeps_them_together() -> None:
    apart = Mirrored(map={"embed": 0, "rest": 1})
    (told,) = apart.validate_model(gpt(), FOUR)
    assert str(told).endswith("which is on 0. Tied weights stay on one device: put head on 0 too.")
    resolved = Mirrored(map="auto", replicas=2).resolve(gpt, FOUR)
    assert resolved.devices == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert isinstance(resolved.map, dict)
    assert resolved.map["embed"] == resolved.map["head"]
    assert set(resolved.map.values()) == {0, 1}


def test_the_plan_counts_a_part_for_each_device_of_a_replica() -> None:
    model, strategy = gpt(), Mirrored(map=HALVES)
    first, second = replica_parts(strategy, model, FOUR, num_shards=1)
    assert set(second.memory.resident) == {
        name for name, _ in model.named_parameters() if name.startswith(("blocks.2", "blocks.3"))
    }
    assert first.memory.resident.keys().isdisjoint(second.memory.resident)
    assert first.memory.gradient_copies == 1  # the vectors of the exchange
    assert strategy.estimate_memory(model, FOUR) == first.memory
    parts = strategy.describe_partition(model, FOUR)
    assert [(part.modules, part.device) for part in parts] == [
        ("embed, blocks.0-1", "cuda:0, cuda:2"),
        ("blocks.2-3", "cuda:1, cuda:3"),
        ("head", "cuda:0, cuda:2"),
    ]


def test_a_job_takes_all_devices_of_its_groups_and_blocks_are_compiled() -> None:
    mapped = Mirrored(map={"embed": 0, "rest": 1})
    assert (num_slots(mapped, 4), num_slots(mapped, 0), num_slots(Mirrored(replicas=3), 4)) == (4, 2, 3)
    assert (traits_here(mapped).compiles, traits_here(mapped).compiles_step) == ("blocks", False)
    assert traits_here(Mirrored()) == Mirrored.traits


def test_one_replica_with_a_map_is_worth_a_proof() -> None:
    assert proof_problems(Mirrored(map={"rest": 0}, replicas=1), PlanContext()) == []
    assert len(proof_problems(Mirrored(replicas=1), PlanContext())) == 1


def test_nccl_is_bound_to_no_gpu_where_a_rank_exchanges_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **named: given.append(named["device_id"]))
    task = Task(role="worker", index=0, rank=0, device="cuda:0")
    identity = Identity(task=task, num_ranks=1, store=None, prefix="0", token="of this test")
    for settings in ({}, {"map": {"embed": 0, "rest": 1}}, {"map": "auto", "devices": ((0, "cpu"),)}):
        strategy = Mirrored(process_group="always", **settings)
        found = strategy._replica_map(FOUR)
        strategy.join(identity, exchanges_on_gpus=found is not None and found.spans_gpus)
    assert given == [torch.device("cuda:0"), None, torch.device("cuda:0")]
