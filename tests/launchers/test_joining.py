"""Processes of a launch that write two folders, differ in a config, or outlive each other are caught here alone.
A process of a launch that fails alone while the others wait for ever is caught here alone, by place.
A cluster of TF_CONFIG that trains other bits, or whose tasks do not all end with a refusal, is caught here alone.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.joining import free_port, free_ports
from tests.support.pool import Pool
from tests.support.present import present
from tests.support.results import result_of, sha256
from tests.support.verdicts import plain
from trainkit.cli import main
from trainkit.errors import ConfigError, DataError
from trainkit.run.folder.run_folder import RunFolder

HERE = "tests.launchers.joining"
STARTED_AGAIN = {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Start a launch; per rank what came back, what was raised and what was said."""

    def go(
        *overrides: Any, num_ranks: int = 2, function: str = "train", environ: dict[str, str] | None = None
    ) -> list[Any]:
        args = (str(tmp_path), free_port(), *overrides)
        if environ is not None:
            function, args = "train_as", (args[0], args[1], environ, overrides)
        return pool.run(f"{HERE}.{function}", *args, num_ranks=num_ranks)

    return go


def folders(tmp_path: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("resolved.yaml"))


def test_a_launch_makes_one_run_folder_and_the_bits_of_mirrored(
    start: Callable[..., list[Any]], alone: str, tmp_path: Path
) -> None:
    (result, _, log_0), (other, _, log_1) = start()
    assert log_0.startswith("launch by RANK and WORLD_SIZE: rank 0 of 2 on one host, rendezvous at 127.0.0.1:")
    assert log_1.endswith("\nworker:1, rank 1 of 2: its output goes to run/logs/rank_1.log\n")
    assert (other["status"], other["folder"]) == ("finished", str(tmp_path / "run"))
    assert folders(tmp_path) == ["run"]
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    assert result["weights_sha256"] == alone


def test_one_launch_may_train_again_and_again(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    for rank in start(function="train_twice"):
        assert [error for _, error, _ in rank] == [None, None]
    assert folders(tmp_path) == ["run_1", "run_2"]


def test_processes_with_other_configs_are_refused_and_nothing_is_written(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    outcomes = start([["seed=1", "log_every_steps=5"], ["seed=2"]], function="train_unlike")
    lines = [
        "2 problems in the config",
        "  log_every_steps=5: worker:1 has 10. Start all with the same config. (worker:0)",
        "  seed=1: worker:1 has 2. Start all with the same config. (worker:0)",
    ]
    assert outcomes[0][1] == ("ConfigError", 2, "\n".join(lines))
    assert outcomes[1][1] == ("PeerError", 2, f"rank 1 ends with rank 0: {lines[1].strip()}")
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_does_not_join_is_named_when_the_join_timeout_is_over(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    _, error, log = start("supervisor.join_timeout_s=1", function="train_alone", num_ranks=1)[0]
    assert error == ("HangError", 5, "waited 1 s (supervisor.join_timeout_s) for worker:1.")
    assert log.splitlines()[1] == "waiting for worker:1"
    assert list(tmp_path.iterdir()) == []


def test_settings_without_effect_are_refused(start: Callable[..., list[Any]], cwd: Path) -> None:
    error = start("supervisor.max_restarts=2", num_ranks=1, function="train_alone")[0][1]
    rule = "has no effect: RANK and WORLD_SIZE started the processes and supervises them. (command line)"
    assert error == ("ConfigError", 2, f"1 problem in the config\n  supervisor.max_restarts=2: {rule}")
    from trainkit import api

    with pytest.raises(ConfigError) as caught:
        api.train(api.compose(["recipe=null", "strategy=mirrored", "supervisor.join_timeout_s=3"]))
    assert str(caught.value).splitlines()[1] == (
        "  supervisor.join_timeout_s=3: has no effect: no other process was started. (command line)"
    )
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_no_process_of_a_launch_measures_a_number_of_workers(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    outcomes = start("loader.cache=false", "loader.num_workers=auto")
    rule = "loader.num_workers=auto: is measured by short trainings in processes that trainkit starts on this host"
    assert all(rule in error[2] for _, error, _ in outcomes)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_the_others_and_is_named(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    outcomes = start(environ={"TRAINKIT_FAIL": "rank=1,step=3,phase=backward,action=raise"})
    headline = "rank 1 failed in step 3 (backward): RuntimeError: failpoint in backward of step 3."
    kind, code, text = outcomes[0][1]
    assert (kind, code, plain(text).splitlines()[0]) == ("TrainingError", 1, headline)
    assert (*outcomes[1][1][:2], plain(outcomes[1][1][2])) == ("PeerError", 1, f"rank 1 ends: {headline}")
    assert plain(present(RunFolder(tmp_path / "run").read_result())["reason"]).startswith(headline)
    assert "\nTraceback (most recent call last):" in outcomes[1][2]  # into its log


def test_a_launch_that_is_started_again_goes_on_in_its_folder_on_more_processes(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    fail = {"TRAINKIT_FAIL": "rank=1,step=7,phase=reduce,action=raise"}
    fixed = ("checkpoint.every_steps=4", "batch.micro_size=null")
    whole = start(*fixed, "hydra.run.dir=whole")[0][0]
    assert start(*fixed, environ=STARTED_AGAIN | fail)[0][1] is not None
    assert start(*fixed, num_ranks=3, environ=STARTED_AGAIN)[0][0]["weights_sha256"] == whole["weights_sha256"]
    assert folders(tmp_path) == ["run", "whole"]
    assert not (tmp_path / "run/live.aside").exists()
    notes = json.loads((tmp_path / "run/environment.json").read_text())["notes"]
    assert f"restarted by the launcher: continues {tmp_path / 'run'}" in notes


def test_a_task_that_stands_for_a_host_runs_a_rank_a_device(
    start: Callable[..., list[Any]], alone: str, tmp_path: Path
) -> None:
    workers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    spec = ["cluster=spec", f"cluster.worker=[{workers}]"]
    arguments = [[*spec, f"cluster.task=worker:{index}", "strategy.replicas=4"] for index in range(2)]
    assert start(arguments, function="train_unlike")[0][0]["weights_sha256"] == alone
    assert sorted(path.name for path in (tmp_path / "run/logs").iterdir()) == [f"rank_{rank}.log" for rank in (1, 2, 3)]


def test_a_finished_launch_that_is_started_again_is_another_run(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for _ in range(2):
        start(environ=STARTED_AGAIN)
    assert folders(tmp_path) == ["run", "run-2"]
    assert list(tmp_path.rglob(".launches/*")) == []


def test_a_second_group_cannot_write_into_the_folder_of_the_first(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    start("stop_at_step=4", num_ranks=1)
    with RunFolder(tmp_path / "run").lock():
        outcomes = start("resume=auto", function="train_impatiently")
    kind, code, text = outcomes[0][1]
    assert (kind, code) == ("ConfigError", 2)
    assert "run: in use by process" in text
    assert outcomes[1][1][:2] == ("PeerError", 2)


ABSENT = DataError("/data/labels.txt is absent.")
PLACES = {
    "cores": "trainkit.run.rendezvous.join.own_cores",
    "the plan": "trainkit.run.begin.make_plan",
    "log": "trainkit.run.rendezvous.join.announce_log",
    "the model": "trainkit.run.session.session.transformed_model",
    "the loader": "trainkit.run.session.session.loader_of",
    "a step": "trainkit.strategies.core.synchronous.apply_update",
}


def test_a_number_of_threads_may_be_set_for_some_ranks_only(start: Callable[..., list[Any]]) -> None:
    outcomes = start([{"OMP_NUM_THREADS": "1"}, {}], function="train_apart")
    assert [result["status"] for result, _, _ in outcomes] == ["finished", "finished"]


@pytest.mark.parametrize("phase", PLACES)
def test_a_rank_that_fails_alone_ends_the_others_with_its_reason(
    start: Callable[..., list[Any]], phase: str, tmp_path: Path
) -> None:
    (_, first, _), (_, other, _) = start(PLACES[phase], ABSENT, function="train_with_one_unlike")
    assert first[:2] == ("DataError", 3)
    assert all("/data/labels.txt is absent." in error[2] for error in (first, other))
    assert other[1] == 3
    result = RunFolder(tmp_path / "run").read_result()
    assert "/data/labels.txt is absent." in result["reason"] if result else phase in {"cores", "the plan"}


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("packages", {"trainkit": "0.0.9"}, "version of trainkit=0.1.0: worker:1 has 0.0.9. Start all with the same"),
        ("size_of", 7, "data, samples of train=1437: worker:1 has 7. All need the same."),
    ],
)
def test_a_host_with_another_version_or_other_data_is_refused(
    start: Callable[..., list[Any]], name: str, answer: Any, problem: str, tmp_path: Path
) -> None:
    (_, first, _), (_, other, _) = start(
        f"trainkit.run.rendezvous.barrier.{name}", answer, function="train_with_one_unlike"
    )
    assert (first[:2], other[:2]) == (("ConfigError", 2), ("PeerError", 2))
    assert problem in first[2]
    assert list(tmp_path.iterdir()) == []


PS = "strategy=parameter_server"
OVER_HOSTS = "strategy=multi_worker_mirrored"
SAVING = ("checkpoint.every_steps=6", "checkpoint.keep_last=9")


@pytest.fixture
def start_tasks(pool: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Start every task of a cluster, given by the number of tasks of each role."""

    def go(roles: dict[str, int], *overrides: str) -> list[Any]:
        ports = iter(free_ports(sum(roles.values())))
        cluster = {role: [f"localhost:{next(ports)}" for _ in range(count)] for role, count in roles.items()}
        args = (str(tmp_path), 0, cluster, overrides)
        return pool.run(f"{HERE}.train_as_task", *args, num_ranks=sum(roles.values()))

    return go


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of one device."""
    args = (str(tmp_path_factory.mktemp("alone")), free_port(), "strategy=one_device")
    return str(pool.run(f"{HERE}.train", *args, num_ranks=1)[0][0]["weights_sha256"])


@pytest.mark.parametrize(
    ("strategy", "roles"),
    [
        pytest.param(OVER_HOSTS, {"worker": 2, "evaluator": 1}, marks=pytest.mark.slow),
        pytest.param(PS, {"worker": 2, "ps": 1}, marks=pytest.mark.slow),
        pytest.param(OVER_HOSTS, {"chief": 1, "worker": 1}, marks=pytest.mark.long),
        pytest.param(PS, {"chief": 1, "worker": 1, "ps": 2, "evaluator": 1}, marks=pytest.mark.long),
        pytest.param("strategy=one_device", {"worker": 1, "evaluator": 1}, marks=pytest.mark.long),
    ],
)
def test_a_right_cluster_ends_with_the_bits_of_one_device(
    start_tasks: Callable[..., list[Any]], alone: str, tmp_path: Path, strategy: str, roles: dict[str, int]
) -> None:
    assert [error for _, error, _ in start_tasks(roles, strategy, *SAVING)] == [None] * sum(roles.values())
    assert sha256(tmp_path / "run") == alone
    if "evaluator" in roles:
        rows = map(json.loads, (tmp_path / "run/evaluations.jsonl").read_text().splitlines())
        assert [row["step"] for row in rows] == [6, 12]
        evaluator = result_of(tmp_path / "run")["evaluator"]
        assert (evaluator["status"], evaluator["evaluated"]) == ("finished", 2)


@pytest.mark.slow
def test_a_launch_without_roles_has_a_chief_and_a_server(pool: Pool, alone: str, tmp_path: Path) -> None:
    args = (str(tmp_path), free_port(), {"TORCHELASTIC_RUN_ID": "job"}, (PS,))
    assert [error for _, error, _ in pool.run(f"{HERE}.train_as", *args, num_ranks=3)] == [None] * 3
    assert sha256(tmp_path / "run") == alone


@pytest.mark.slow
def test_all_tasks_of_a_refused_run_end_with_the_same_refusal(
    start_tasks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    outcomes = start_tasks({"chief": 1, "worker": 2, "ps": 1}, PS, "batch.global_size=64", "batch.micro_size=32")
    assert [error[1] for _, error, _ in outcomes] == [2] * 4
    rule = "batch.micro_size=32: cuts a step of 64 samples into 2 shards, fewer than the 3 replicas."
    assert all(rule in error[2] for _, error, _ in outcomes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_refusal_that_only_the_chief_finds_reaches_late_tasks(
    start_tasks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    outcomes = start_tasks({"worker": 2, "ps": 1, "evaluator": 1}, PS, "model.in_features=3")
    assert [error[:2] for _, error, _ in outcomes] == [("ConfigError", 2), *[("PeerError", 2)] * 3]
    assert plain(outcomes[1][1][2]).startswith("worker:1 ends with worker:0 (localhost:")
    rule = "model.in_features=3: the layer takes 3 features, and it gets 64."
    assert all(rule in error[2] for _, error, _ in outcomes)
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_the_strategy_cannot_use_is_refused_by_each_task_alone(
    monkeypatch: pytest.MonkeyPatch, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two: dict[str, list[str]] = {"worker": ["a:1", "b:1"]}
    for overrides, cluster, problem in (
        (["strategy=fsdp"], {"worker": ["a:1"], "ps": ["b:1"]}, "cluster.ps: TF_CONFIG names tasks of this role"),
        ([PS], two, "TF_CONFIG names no task of the role ps"),
        ([PS, "strategy.servers=2"], {**two, "ps": ["c:1"]}, "strategy.servers=2: but TF_CONFIG names 1"),
        ([PS, "strategy.evaluator=true"], {**two, "ps": ["c:1"]}, "strategy.evaluator=true: TF_CONFIG starts the"),
    ):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
        assert main(["recipe=null", *overrides]) == 2
        assert problem in capsys.readouterr().err
        assert list(cwd.iterdir()) == []


def test_a_mistyped_variable_is_refused_before_torch_is_imported(cwd: Path) -> None:
    script = f"import sys; from trainkit.cli import main; print(main(['{OVER_HOSTS}']), 'torch' in sys.modules)"
    variables = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}),
        "PATH": "",
    }
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "TF_CONFIG.cluster.worker=b: has no port." in done.stderr
    assert list(cwd.iterdir()) == []
