"""A cluster whose last rank computes instead of keeping variables is caught here alone.

What a parameter server refuses, and the tasks that it asks for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.launchers.launches import launch_of
from trainkit.cluster.tasks import Task
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.parameter_server import ParameterServer
from trainkit.strategies.updates.scheduler import Staleness, staleness_summary

ANY, REPRODUCIBLE = PlanContext(), PlanContext(numerics=Numerics(reproducible=True))
REPLACED = {"workers": 3, "spare_replicas": 1, "spare_mode": "replace"}
STALE = {name: Staleness(policy=name) for name in ("scale", "drop")}
REFUSED: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"workers": 2, "spare_replicas": 2}, ANY, "strategy.spare_replicas=2", "Use 1 or less."),
    ({"spare_mode": "replace"}, ANY, "strategy.spare_mode=replace", "without strategy.spare_replicas"),
    (REPLACED, REPRODUCIBLE, "numerics.reproducible=true", "depends on time"),
    (REPLACED | {"devices_per_worker": 2}, ANY, "strategy.devices_per_worker=2", "single shards"),
    ({"staleness": STALE["scale"]}, ANY, "strategy.staleness.policy=scale", "with strategy.mode=sync"),
    ({"warmup_steps": 3}, ANY, "strategy.warmup_steps=3", "with strategy.mode=sync"),
    (
        {"mode": "async", "workers": 3, "spare_replicas": 1},
        ANY,
        "strategy.spare_replicas=1",
        "with strategy.mode=async",
    ),
    ({"mode": "async", "spare_mode": "replace"}, ANY, "strategy.spare_mode=replace", "with strategy.mode=async"),
    ({"mode": "async"}, REPRODUCIBLE, "numerics.reproducible=true", "Use strategy.mode=sync"),
    ({"mode": "async", "staleness": STALE["drop"]}, ANY, "strategy.staleness.bound=null", "needed by"),
    ({"mode": "async", "staleness": Staleness(policy="lr", bound=3)}, ANY, "strategy.staleness.bound=3", "no effect"),
    ({"transfer": "bf16"}, REPRODUCIBLE, "strategy.transfer=bf16", "Use full"),
    ({"devices_per_worker": 3}, PlanContext(num_gpus=2), "strategy.devices_per_worker=3", "2 GPUs"),
    ({"replay": "nowhere"}, ANY, "strategy.replay=nowhere", "updates.jsonl"),
]


def test_impossible_settings_are_problems_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for settings, facts, key, word in REFUSED:
        (problem,) = ParameterServer(**settings).validate(facts)
        assert str(problem).startswith(f"{key}: ")
        assert word in str(problem)


def launch(*roles: str) -> PlanContext:
    tasks = tuple(Task(role=role, index=roles[:rank].count(role), rank=rank) for rank, role in enumerate(roles))
    return PlanContext(launch=launch_of(tasks=tasks, kind="a cluster spec", num_local=1, num_hosts=4, names_roles=True))


def test_a_launch_decides_how_many_tasks_there_are() -> None:
    facts = launch("chief", "worker", "worker", "ps", "ps")
    strategy = ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1"]
    assert (strategy.num_replicas(facts), strategy.num_servers(facts)) == (3, 2)
    (problem,) = replace(strategy, workers=2).validate(facts)
    assert str(problem).startswith("strategy.workers=2: but a cluster spec names 3")


def test_the_first_worker_is_the_chief_of_a_cluster_that_names_none() -> None:
    facts, strategy = launch("worker", "worker", "ps"), ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts) if strategy.runs_loop(task)] == ["worker:0"]
    assert [str(task) for task in strategy.tasks(facts) if strategy.restarts_alone(task)] == ["worker:1"]
    (problem,) = strategy.validate(launch("chief", "worker"))
    assert "Add one: ps=[HOST:PORT]." in str(problem)


def test_the_last_ranks_of_a_launch_without_roles_keep_the_variables() -> None:
    facts = PlanContext(launch=launch_of(4))
    assert [str(task) for task in ParameterServer().tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert [str(task) for task in ParameterServer(servers=2).tasks(facts)] == ["chief:0", "worker:0", "ps:0", "ps:1"]
    (few,) = ParameterServer(servers=4).validate(facts)
    assert "started 4 processes. Start 5 or more." in str(few)
    (other,) = ParameterServer(workers=2).validate(facts)
    assert str(other).startswith("strategy.workers=2: but torchrun started 4 processes: 3")


def test_only_the_chief_trains_and_only_workers_are_replaced_alone() -> None:
    strategy = ParameterServer(workers=2, evaluator=True)
    tasks = strategy.tasks(PlanContext(num_gpus=2))
    assert [task.role for task in tasks if strategy.runs_loop(task)] == ["chief"]
    assert [task.role for task in tasks if strategy.restarts_alone(task)] == ["worker"]
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1", "cpu", "cpu"]


def test_workers_of_several_devices_take_the_gpus_in_turn() -> None:
    strategy = ParameterServer(workers=3, devices_per_worker=2)
    assert [task.device for task in strategy.tasks(PlanContext(num_gpus=4))] == ["cuda:0", "cuda:2", "cuda:0", "cpu"]
    assert (strategy.num_replicas(PlanContext()), replace(strategy, mode="async").num_replicas(PlanContext())) == (6, 2)
    assert [strategy.num_slots(num_gpus) for num_gpus in (0, 4, 8)] == [7, 4, 6]


def test_a_note_of_the_parameter_server_names_a_different_training() -> None:
    for same in (ParameterServer(), ParameterServer(mode="async", workers=1)):
        assert same.notes(nn.Identity(), PlanContext()) == ()
    (note,) = ParameterServer(mode="async", transfer="bf16").notes(nn.Identity(), PlanContext())
    assert all(words in note for words in ("applied as they arrive", "bfloat16", "a different training"))


def test_the_staleness_of_a_run_is_reported_by_mean_and_95th_percentile() -> None:
    assert staleness_summary({0: 5, 3: 90, 9: 5}) == {"mean": 3.15, "p95": 3, "counts": {"0": 5, "3": 90, "9": 5}}


def test_rows_that_are_looked_up_when_they_are_needed_cannot_be_replayed() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 2))
    strategy = ParameterServer(mode="async", replay="run")
    (problem,) = strategy.validate_model(model, PlanContext())
    assert str(problem).startswith("strategy.replay=run: cannot be to the bit")
    assert replace(strategy, mode="sync").validate_model(model, PlanContext()) == []
