"""A launch whose ranks get the wrong GPU or number of replicas is caught here alone, before anything is started.
A second group that writes into the folder of the first, and a wait without an end, are caught here alone.
"""

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.launches import launch_of
from trainkit.cli import main
from trainkit.cluster.launch import LaunchEnvironment, socket_environ
from trainkit.cluster.members import launch_of as launch_in
from trainkit.cluster.tasks import Task
from trainkit.errors import ConfigError, HangError, TrainingError
from trainkit.run.folder.run_folder import FencingToken, RunFolder
from trainkit.run.rendezvous.barrier import WaitReporter, store_of_launch
from trainkit.strategies.base import Numerics, PlanContext, Strategy
from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored
from trainkit.strategies.mesh.strategy import Pipeline, TensorParallel
from trainkit.strategies.one_device import OneDevice


def problems(strategy: Strategy, launch: LaunchEnvironment | None, **facts: Any) -> list[str]:
    return [str(problem) for problem in strategy.validate(PlanContext(launch=launch, **facts))]


@pytest.mark.parametrize("kind", [Mirrored, MultiWorkerMirrored])
def test_the_processes_of_a_launch_are_the_workers(kind: type[Mirrored | MultiWorkerMirrored]) -> None:
    facts = PlanContext(launch=launch_of(3, rank=2, local_rank=2))
    assert problems(kind(), facts.launch) == []
    assert kind().num_replicas(facts) == 3
    assert kind().tasks(facts)[2] == Task(role="worker", index=2, rank=2, device="cpu")


def test_a_rank_takes_the_gpu_of_its_place_on_the_host() -> None:
    facts = PlanContext(launch=launch_of(4, rank=3, local_rank=1, num_local=2, num_hosts=2), num_gpus=2)
    assert MultiWorkerMirrored().tasks(facts)[3].device == "cuda:1"
    assert MultiWorkerMirrored(devices=("/gpu:1", 0)).tasks(facts)[3].device == "cuda:0"


def test_a_process_that_stands_for_a_host_has_a_rank_a_device() -> None:
    launch = launch_of(2, rank=1, num_local=1, num_hosts=2, takes_devices=True)
    facts = PlanContext(launch=launch, num_gpus=2)
    assert MultiWorkerMirrored().num_replicas(facts) == 4
    assert MultiWorkerMirrored().tasks(facts)[2:] == (
        Task(role="worker", index=2, rank=2, device="cuda:0"),
        Task(role="worker", index=3, rank=3, device="cuda:1"),
    )
    assert MultiWorkerMirrored(replicas=2).num_replicas(facts) == 2


def test_a_launch_that_a_strategy_has_no_use_for_is_refused() -> None:
    (problem,) = problems(OneDevice(), launch_of(2))
    assert problem.startswith("strategy=one_device: torchrun started 2 processes, and it has work for one.")
    assert problems(OneDevice(), launch_of(1)) == []
    (problem,) = problems(Mirrored(), launch_of(2, num_local=1, num_hosts=2))
    assert problem.startswith("strategy=mirrored: runs on one host, and torchrun started 2.")
    (problem,) = problems(Mirrored(), launch_of(3), num_gpus=2)
    assert problem.startswith("strategy.replicas=3: more replicas on this host than its 2 GPUs.")
    (problem,) = problems(Mirrored(), launch_of(9), numerics=Numerics(reproducible=True))
    assert problem.startswith("strategy.replicas=9: more replicas than numerics.lanes=8.")


def test_all_settings_that_a_launch_cannot_give_are_reported_together() -> None:
    roles = (Task(role="chief", index=0, rank=0), Task(role="ps", index=0, rank=1))
    launch = launch_of(2, tasks=roles, kind="TF_CONFIG")
    role, replicas, devices = problems(MultiWorkerMirrored(replicas=3, devices=("cpu", "cpu", "cpu")), launch)
    assert role.startswith("cluster.ps: TF_CONFIG names tasks of this role")
    assert replicas.startswith("strategy.replicas=3: but TF_CONFIG started 2 processes, a replica each")
    assert devices.startswith("strategy.devices=['cpu', 'cpu', 'cpu']: TF_CONFIG started 2 processes on this host")


def test_replicas_are_those_of_the_whole_run_under_every_launch() -> None:
    hosts = launch_of(2, num_local=1, num_hosts=2, takes_devices=True, kind="TF_CONFIG")
    assert problems(MultiWorkerMirrored(replicas=4), hosts) == []
    assert MultiWorkerMirrored(replicas=4).num_replicas(PlanContext(launch=hosts)) == 4
    assert problems(MultiWorkerMirrored(replicas=3), hosts) == [
        "strategy.replicas=3: but TF_CONFIG started 2 processes, each with as many replicas. Use a multiple of 2."
    ]
    processes = launch_of(4, num_local=2, num_hosts=2)
    assert problems(MultiWorkerMirrored(replicas=4), processes) == []
    assert problems(MultiWorkerMirrored(replicas=2), processes) == [
        "strategy.replicas=2: but torchrun started 4 processes, a replica each. Use 4, or start 2."
    ]
    assert problems(Pipeline(replicas=3), hosts) == []  # of two ranks each: three in each process
    assert Pipeline(replicas=2).num_replicas(PlanContext(launch=hosts)) == 2
    assert problems(TensorParallel(degree=2, replicas=1), launch_of(3)) == [
        "strategy: torchrun started 3 processes, and a replica takes 2. Start a multiple of 2."
    ]


def test_the_evaluator_of_a_cluster_is_none_of_the_ranks_that_train() -> None:
    members = {"worker": ["a:1", "a:2"], "evaluator": ["a:3"]}
    launches = [launch_in(members, task, kind="TF_CONFIG").training for task in (("worker", 1), ("evaluator", 0))]
    assert [(launch.rank, launch.local_rank, launch.num_local, launch.num_ranks) for launch in launches] == [
        (1, 1, 2, 2), (0, 0, 2, 2),
    ]  # fmt: skip
    assert problems(Mirrored(), launches[0]) == []


class Clock:
    """Time that passes during sleeps only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_for_ever(patience: WaitReporter) -> None:
    while True:
        patience.wait(0.5)


def test_the_wait_reports_the_missing_task_repeatedly_and_ends_at_its_limit() -> None:
    lines: list[str] = []
    clock = Clock()
    who = "worker:1 (10.0.0.2:2222)"
    patience = WaitReporter(lambda: who, timeout_s=60.0, log=lines.append, clock=clock, sleep=clock.sleep)
    with pytest.raises(HangError) as caught:
        wait_for_ever(patience)
    assert lines == [
        f"waiting for {who}",
        f"waiting for {who}, 9 s",
        f"waiting for {who}, 21 s",
        f"waiting for {who}, 45 s",
    ]
    assert str(caught.value) == f"waited 60 s (supervisor.join_timeout_s) for {who}."


def test_a_folder_that_another_host_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        FencingToken.verify(folder, "token", timeout_s=0.0)
    assert str(caught.value).splitlines()[1] == (
        f"  run folder={folder.path}: rank 0 made it, and {socket.gethostname()} does not see it. All processes write "
        "into one run folder: start them in a folder of a file system that the hosts share, or name one with "
        "hydra.run.dir."
    )


def test_a_group_that_comes_back_late_finds_the_folder_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = FencingToken.acquire(folder)
    assert FencingToken.verify(folder, first.token) == first
    second = FencingToken.acquire(folder)
    second.check()
    with pytest.raises(TrainingError, match=rf"^{tmp_path} was taken over by process \d+ on .+\. This group ends and"):
        first.check()


def test_no_checkpoint_gets_its_name_where_the_folder_is_another_groups(tmp_path: Path) -> None:
    import torch

    from tests.support.saving import save
    from trainkit.trainer.manifest import list_complete

    folder = RunFolder(tmp_path)
    fence = FencingToken.acquire(folder)
    tensors = {"param/a": torch.zeros(2)}
    save(folder.checkpoints, step=1, tensors=tensors, meta={}, confirm=fence.check)
    FencingToken.acquire(folder)
    with pytest.raises(TrainingError, match="was taken over by"):
        save(folder.checkpoints, step=2, tensors=tensors, meta={}, confirm=fence.check)
    assert [checkpoint.step for checkpoint in list_complete(folder.checkpoints)] == [1]


def test_on_one_host_gloo_stays_on_the_loopback_interface() -> None:
    assert socket_environ("localhost", on_one_host=False) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            store_of_launch(launch_of(2, store=("127.0.0.1", port)))
    assert str(caught.value).splitlines()[1] == (
        f"  store=127.0.0.1:{port}: rank 0 cannot listen there: Address already in use."
    )


def test_a_sweep_in_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    assert main(["-m", "seed=1,2"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == (
        "  -m: this is one of 2 processes that RANK and WORLD_SIZE started, and each would run every point. Start the "
        "sweep without the launcher (TRAINKIT_LAUNCHER=none), or each point with it. (command line)"
    )
