"""What a parameter server refuses, and the tasks that it asks for."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Task
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.parameter_server import ParameterServer
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness, staleness_summary

REPRODUCIBLE = PlanContext(numerics=Numerics(reproducible=True))


@pytest.mark.parametrize(
    ("strategy", "facts", "expected"),
    [
        (
            ParameterServer(workers=2, spare_replicas=2),
            PlanContext(),
            (
                "strategy.spare_replicas=2: spares are among strategy.workers=2, and at least one must compute. "
                "Use 1 or less."
            ),
        ),
        (
            ParameterServer(spare_mode="replace"),
            PlanContext(),
            "strategy.spare_mode=replace: has no effect without strategy.spare_replicas. Leave it out.",
        ),
        (
            ParameterServer(workers=3, spare_replicas=1, spare_mode="replace"),
            REPRODUCIBLE,
            (
                "numerics.reproducible=true: with strategy.spare_mode=replace, which shards make a step depends on "
                "time. Use duplicate, or false."
            ),
        ),
        (
            ParameterServer(staleness=Staleness(policy="scale")),
            PlanContext(),
            (
                "strategy.staleness.policy=scale: has no effect with strategy.mode=sync: gradients are never stale. "
                "Leave it out."
            ),
        ),
        (
            ParameterServer(warmup_steps=3),
            PlanContext(),
            "strategy.warmup_steps=3: has no effect with strategy.mode=sync: gradients are never stale. Leave it out.",
        ),
        (
            ParameterServer(mode="async", workers=3, spare_replicas=1),
            PlanContext(),
            (
                "strategy.spare_replicas=1: has no effect with strategy.mode=async: no step waits for all its "
                "gradients. Leave it out."
            ),
        ),
        (
            ParameterServer(mode="async", spare_mode="replace"),
            PlanContext(),
            (
                "strategy.spare_mode=replace: has no effect with strategy.mode=async: no step waits for all its "
                "gradients. Leave it out."
            ),
        ),
        (
            ParameterServer(mode="async"),
            REPRODUCIBLE,
            (
                "numerics.reproducible=true: asynchronous updates come in another order every time. Use "
                "strategy.mode=sync, or false."
            ),
        ),
        (
            ParameterServer(mode="async"),
            PlanContext(precision="fp16_mixed"),
            (
                "precision=fp16_mixed: has one loss scale, and gradients in flight were computed with several. Use "
                "precision=bf16_mixed."
            ),
        ),
        (
            ParameterServer(mode="async", staleness=Staleness(policy="drop")),
            PlanContext(),
            "strategy.staleness.bound=null: is needed by strategy.staleness.policy=drop. Give a number of updates.",
        ),
        (
            ParameterServer(mode="async", staleness=Staleness(policy="lr", bound=3)),
            PlanContext(),
            (
                "strategy.staleness.bound=3: has no effect with strategy.staleness.policy=lr. Use drop or bound, or "
                "leave it out."
            ),
        ),
        (
            ParameterServer(transfer="bf16"),
            REPRODUCIBLE,
            (
                "strategy.transfer=bf16: rounds transferred numbers, and numerics.reproducible promises the bits of "
                "one "
                "device. Use full, or false."
            ),
        ),
        (
            ParameterServer(devices_per_worker=3),
            PlanContext(num_gpus=2),
            "strategy.devices_per_worker=3: and this host has 2 GPUs. Use that many, or fewer.",
        ),
        (
            ParameterServer(workers=3, devices_per_worker=2, spare_replicas=1, spare_mode="replace"),
            PlanContext(),
            (
                "strategy.devices_per_worker=2: with strategy.spare_mode=replace, an update is made of single shards. "
                "Use duplicate, or 1."
            ),
        ),
        (
            ParameterServer(replay="nowhere"),
            PlanContext(),
            "strategy.replay=nowhere: holds no updates.jsonl. Give the folder of a run with strategy=parameter_server.",
        ),
    ],
)
def test_impossible_settings_of_a_parameter_server_are_problems_before_the_start(
    strategy: ParameterServer, facts: PlanContext, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(problem) for problem in strategy.validate(facts)] == [expected]


def launch(*roles: str) -> PlanContext:
    tasks = tuple(Task(role=role, index=roles[:rank].count(role), rank=rank) for rank, role in enumerate(roles))
    made = LaunchEnvironment(
        kind="a cluster spec", tasks=tasks, rank=0, local_rank=0, num_local=1, num_hosts=4, store=("10.0.0.1", 29400),
        names_roles=True,
    )  # fmt: skip
    return PlanContext(launch=made)


def test_a_launch_decides_how_many_tasks_there_are() -> None:
    facts = launch("chief", "worker", "worker", "ps", "ps")
    strategy = ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1"]
    assert (strategy.num_replicas(facts), strategy.num_servers(facts)) == (3, 2)
    (problem,) = replace(strategy, workers=2).validate(facts)
    assert str(problem) == ("strategy.workers=2: but a cluster spec names 3, the chief among them. Leave it out.")


def test_the_first_worker_is_the_chief_of_a_cluster_that_names_none() -> None:
    facts, strategy = launch("worker", "worker", "ps"), ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts) if strategy.runs_loop(task)] == ["worker:0"]
    assert [str(task) for task in strategy.tasks(facts) if strategy.restarts_alone(task)] == ["worker:1"]
    (problem,) = strategy.validate(launch("chief", "worker"))
    assert str(problem) == (
        "strategy=parameter_server: a cluster spec names no task of the role ps, which keeps the variables. "
        "Add one: ps=[HOST:PORT]."
    )


def test_the_last_ranks_of_a_launch_without_roles_keep_the_variables() -> None:
    made = LaunchEnvironment(
        kind="torchrun", tasks=workers(4), rank=0, local_rank=0, num_local=4, num_hosts=1, store=("127.0.0.1", 1)
    )
    facts = PlanContext(launch=made)
    assert [str(task) for task in ParameterServer().tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert [str(task) for task in ParameterServer(servers=2).tasks(facts)] == ["chief:0", "worker:0", "ps:0", "ps:1"]
    (few,) = ParameterServer(servers=4).validate(facts)
    assert str(few) == (
        "strategy=parameter_server: needs a chief and 4 to keep the variables, and torchrun started 4 processes. "
        "Start 5 or more."
    )
    (other,) = ParameterServer(workers=2).validate(facts)
    assert str(other) == (
        "strategy.workers=2: but torchrun started 4 processes: 3, the chief among them. Leave it out."
    )


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
    assert ParameterServer().notes(nn.Identity()) == ParameterServer(mode="async", workers=1).notes(nn.Identity()) == ()
    (note,) = ParameterServer(mode="async", transfer="bf16").notes(nn.Identity())
    assert note == (
        "parameter_server: the gradients of several workers are applied as they arrive, numbers are sent as bfloat16: "
        "a different training from that of one device."
    )


def test_the_staleness_of_a_run_is_reported_by_mean_and_95th_percentile() -> None:
    assert staleness_summary({0: 5, 3: 90, 9: 5}) == {"mean": 3.15, "p95": 3, "counts": {"0": 5, "3": 90, "9": 5}}


def test_rows_that_are_looked_up_when_they_are_needed_cannot_be_replayed() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 2))
    strategy = ParameterServer(mode="async", replay="run")
    (problem,) = strategy.validate_model(model, PlanContext())
    assert str(problem) == (
        "strategy.replay=run: cannot be to the bit: rows of sparse tables are read at each lookup. Leave it out."
    )
    assert replace(strategy, mode="sync").validate_model(model, PlanContext()) == []
