"""A cluster of TF_CONFIG that trains other bits, or whose tasks do not all end with a refusal, is caught here alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.joining import free_port
from tests.support.pool import Pool
from tests.support.verdicts import plain
from trainkit.cli import main

HERE = "tests.launchers.joining"
PS = "strategy=parameter_server"
OVER_HOSTS = "strategy=multi_worker_mirrored"
SAVING = ("checkpoint.every_steps=6", "checkpoint.keep_last=9")


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Start every task of a cluster, given by the number of tasks of each role."""

    def go(roles: dict[str, int], *overrides: str) -> list[Any]:
        cluster = {role: [f"localhost:{free_port()}" for _ in range(count)] for role, count in roles.items()}
        args = (str(tmp_path), 0, cluster, overrides)
        return pool.run(f"{HERE}.train_as_task", *args, num_ranks=sum(roles.values()))

    return go


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of one device."""
    args = (str(tmp_path_factory.mktemp("alone")), free_port(), "strategy=one_device")
    return str(pool.run(f"{HERE}.train", *args, num_ranks=1)[0][0]["weights_sha256"])


def sha256(folder: Path) -> str:
    return str(json.loads((folder / "run/result.json").read_text())["weights_sha256"])


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
    start: Callable[..., list[Any]], alone: str, tmp_path: Path, strategy: str, roles: dict[str, int]
) -> None:
    assert [error for _, error, _ in start(roles, strategy, *SAVING)] == [None] * sum(roles.values())
    assert sha256(tmp_path) == alone
    if "evaluator" in roles:
        rows = map(json.loads, (tmp_path / "run/evaluations.jsonl").read_text().splitlines())
        assert [row["step"] for row in rows] == [6, 12]
        evaluator = json.loads((tmp_path / "run/result.json").read_text())["evaluator"]
        assert (evaluator["status"], evaluator["evaluated"]) == ("finished", 2)


@pytest.mark.long
def test_an_evaluator_works_beside_tasks_of_several_ranks(
    start: Callable[..., list[Any]], alone: str, tmp_path: Path
) -> None:
    told = start({"worker": 2, "evaluator": 1}, OVER_HOSTS, "strategy.replicas=4", *SAVING)
    assert [error for _, error, _ in told] == [None] * 3
    assert sha256(tmp_path) == alone
    logs = sorted(path.name for path in (tmp_path / "run/logs").iterdir())
    assert logs == [f"rank_{rank}.log" for rank in (1, 2, 3, 4)]


@pytest.mark.slow
def test_a_launch_without_roles_has_a_chief_and_a_server(pool: Pool, alone: str, tmp_path: Path) -> None:
    args = (str(tmp_path), free_port(), {"TORCHELASTIC_RUN_ID": "job"}, (PS,))
    assert [error for _, error, _ in pool.run(f"{HERE}.train_as", *args, num_ranks=3)] == [None] * 3
    assert sha256(tmp_path) == alone


@pytest.mark.slow
def test_all_tasks_of_a_refused_run_end_with_the_same_refusal(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    told = start({"chief": 1, "worker": 2, "ps": 1}, PS, "batch.global_size=64", "batch.micro_size=32")
    assert [error[1] for _, error, _ in told] == [2] * 4
    rule = "batch.micro_size=32: cuts a step of 64 samples into 2 shards, fewer than the 3 replicas."
    assert all(rule in error[2] for _, error, _ in told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_refusal_that_only_the_chief_finds_reaches_late_tasks(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    told = start({"worker": 2, "ps": 1, "evaluator": 1}, PS, "model.in_features=3")
    assert [error[:2] for _, error, _ in told] == [("ConfigError", 2), *[("PeerError", 2)] * 3]
    assert plain(told[1][1][2]).startswith("worker:1 ends with worker:0 (localhost:")
    assert all("model.in_features=3: the layer takes 3 features, and it gets 64." in error[2] for _, error, _ in told)
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_the_strategy_cannot_use_is_refused_by_each_task_alone(
    monkeypatch: pytest.MonkeyPatch, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two: dict[str, list[str]] = {"worker": ["a:1", "b:1"]}
    for overrides, cluster, said in (
        (["strategy=fsdp"], {"worker": ["a:1"], "ps": ["b:1"]}, "cluster.ps: TF_CONFIG names tasks of this role"),
        ([PS], two, "TF_CONFIG names no task of the role ps"),
        ([PS, "strategy.servers=2"], {**two, "ps": ["c:1"]}, "strategy.servers=2: but TF_CONFIG names 1"),
        ([PS, "strategy.evaluator=true"], {**two, "ps": ["c:1"]}, "strategy.evaluator=true: TF_CONFIG starts the"),
    ):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
        assert main(["recipe=null", *overrides]) == 2
        assert said in capsys.readouterr().err
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
