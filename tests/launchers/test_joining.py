"""Processes of a launch that write two folders, differ in a config, or outlive each other are caught here alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.joining import free_port
from tests.support.pool import Pool
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.errors import ConfigError
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
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (result, _, said), (other, _, own) = start()
    assert said == "launch by RANK and WORLD_SIZE: rank 0 of 2 on one host, rendezvous at 127.0.0.1:" + said[-42:]
    assert own.endswith("\nworker:1, rank 1 of 2: its output goes to run/logs/rank_1.log\n")
    assert (other["status"], other["folder"]) == ("finished", str(tmp_path / "run"))
    assert folders(tmp_path) == ["run"]
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    alone = start("strategy=one_device", "hydra.run.dir=alone", num_ranks=1)[0][0]
    assert result["weights_sha256"] == alone["weights_sha256"]


def test_one_launch_may_train_again_and_again(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    for rank in start(function="train_twice"):
        assert [error for _, error, _ in rank] == [None, None]
    assert folders(tmp_path) == ["run_1", "run_2"]


def test_processes_with_other_configs_are_refused_and_nothing_is_written(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    told = start([["seed=1", "log_every_steps=5"], ["seed=2"]], function="train_unlike")
    lines = [
        "2 problems in the config",
        "  log_every_steps=5: worker:1 has 10. Start all with the same config. (worker:0)",
        "  seed=1: worker:1 has 2. Start all with the same config. (worker:0)",
    ]
    assert told[0][1] == ("ConfigError", 2, "\n".join(lines))
    assert told[1][1] == ("PeerError", 2, f"rank 1 ends with rank 0: {lines[1].strip()}")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_is_refused_by_all_and_nothing_is_written(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    told = start("model.in_features=3")
    assert [error[:2] for _, error, _ in told] == [("ConfigError", 2), ("PeerError", 2)]
    assert all("model.in_features=3: the layer takes 3 features, and it gets 64." in error[2] for _, error, _ in told)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_does_not_join_is_named_when_the_join_timeout_is_over(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    _, error, said = start("supervisor.join_timeout_s=0.4", function="train_alone", num_ranks=1)[0]
    assert error == ("HangError", 5, "waited 0.4 s (supervisor.join_timeout_s) for worker:1.")
    assert said.splitlines()[1] == "waiting for worker:1"
    assert list(tmp_path.iterdir()) == []


def test_settings_without_effect_are_refused(start: Callable[..., list[Any]], cwd: Path) -> None:
    told = start("supervisor.max_restarts=2", num_ranks=1, function="train_alone")[0][1]
    rule = "has no effect: RANK and WORLD_SIZE started the processes and supervises them. (command line)"
    assert told == ("ConfigError", 2, f"1 problem in the config\n  supervisor.max_restarts=2: {rule}")
    from trainkit import api

    with pytest.raises(ConfigError) as caught:
        api.train(api.compose(["recipe=null", "strategy=mirrored", "supervisor.join_timeout_s=3"]))
    assert str(caught.value).splitlines()[1] == (
        "  supervisor.join_timeout_s=3: has no effect: no other process was started. (command line)"
    )
    assert list(cwd.iterdir()) == []


def test_an_error_of_one_host_is_raised_on_rank_0_and_ends_all_ranks(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    told = start(function="train_with_a_bad_plan")
    assert told[0][1] == ("DataError", 3, "worker:1: /data/x is absent.")
    assert told[1][1] == ("PeerError", 3, "rank 1 ends with rank 1: /data/x is absent.")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_the_others_and_is_named(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    fail = {"TRAINKIT_FAIL": "rank=1,step=3,phase=backward,action=raise"}
    told = start(environ=fail)
    headline = "rank 1 failed in step 3 (backward): RuntimeError: failpoint in backward of step 3."
    kind, code, text = told[0][1]
    assert (kind, code, plain(text).splitlines()[0]) == ("TrainingError", 1, headline)
    assert (*told[1][1][:2], plain(told[1][1][2])) == ("PeerError", 1, f"rank 1 ends: {headline}")
    assert plain(present(RunFolder(tmp_path / "run").read_result())["reason"]).startswith(headline)
    assert "\nTraceback (most recent call last):" in told[1][2]  # into its log


def test_a_launch_that_is_started_again_goes_on_in_its_folder_on_more_processes(
    start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    fail = {"TRAINKIT_FAIL": "rank=1,step=7,phase=reduce,action=raise"}
    fixed = ("checkpoint.every_steps=4", "batch.micro_size=null")
    whole = start(*fixed, "hydra.run.dir=whole")[0][0]
    assert start(*fixed, environ=STARTED_AGAIN | fail)[0][1] is not None
    result = start(*fixed, num_ranks=3, environ=STARTED_AGAIN)[0][0]
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert folders(tmp_path) == ["run", "whole"]
    assert not (tmp_path / "run/live.aside").exists()
    notes = json.loads((tmp_path / "run/environment.json").read_text())["notes"]
    assert f"restarted by the launcher: continues {tmp_path / 'run'}" in notes


def test_a_task_that_stands_for_a_host_runs_a_rank_a_device(start: Callable[..., list[Any]], tmp_path: Path) -> None:
    spec = ["cluster=spec", f"cluster.worker=[127.0.0.1:{free_port()},127.0.0.1:{free_port()}]"]
    own = [[*spec, f"cluster.task=worker:{index}", "strategy.replicas=4"] for index in range(2)]
    told = start(own, function="train_unlike")
    alone = start("strategy=one_device", "hydra.run.dir=alone", num_ranks=1)[0][0]
    assert told[0][0]["weights_sha256"] == alone["weights_sha256"]
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
        told = start("resume=auto", function="train_impatiently")
    kind, code, text = told[0][1]
    assert (kind, code) == ("ConfigError", 2)
    assert "run: in use by process" in text
    assert told[1][1][:2] == ("PeerError", 2)
