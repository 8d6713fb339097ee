"""Trainings that end after a time: where they end, what their rates follow, and that their record repeats them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trainkit
from tests.contract.running import CONF, QUIET, run
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.numerics.schedules import LearningRate, Linear
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.loop import StopSaveConsensus
from trainkit.trainer.time_limit import TimeLimit, read_record

NET = ("model=net", "data=points", "batch.global_size=16", "batch.micro_size=8", "optimizer=sgd", "schedule=linear")
TIMED = (*NET, "stop_after=0.2s")


def record(folder: Path) -> list[list[int]]:
    lengths: list[list[int]] = json.loads((folder / "stop_after.json").read_text())["lengths"]
    return lengths


def test_the_rate_falls_with_the_share_of_the_time_and_is_never_below_its_end() -> None:
    limit = TimeLimit(seconds=10.0, most=1000)
    rate = LearningRate(base=1, peak=1, start=0, warmup_steps=0, num_steps=1000, schedule=Linear(), length=limit.length)
    limit.take(20, limit.estimate(20, used=2.5))
    assert rate(20) == 1 - 2.5 / 10
    assert rate(90) == pytest.approx(1 / 91)  # faster than estimated: as the last update of a training
    limit.take(100, limit.estimate(100, used=9.0))
    assert rate(100) == pytest.approx(1 - 9 / 10, abs=0.01)
    assert rate(20) == 1 - 2.5 / 10


def test_the_number_of_updates_bounds_the_length() -> None:
    limit = TimeLimit(seconds=10.0, most=50)
    limit.take(20, limit.estimate(20, used=0.1))
    assert limit.length(20) == 50


def test_estimates_are_as_many_as_a_record_holds() -> None:
    limit = TimeLimit(seconds=1.0, most=10**9)
    for step in range(1, 20_000):
        limit.take(step, limit.estimate(step, used=(step / 20_000) ** 2))
    assert 500 < len(limit.lengths) <= 1000


def test_exchanges_come_closer_near_the_end_and_meet_it_within_a_step() -> None:
    limit, step = TimeLimit(seconds=1.0, most=10**9), 0
    agreement = StopSaveConsensus(LocalCollective(), lambda: None, limit=limit)
    exchanges = 0
    while not limit.is_over(step):
        step, exchanges = step + agreement.interval, exchanges + 1
        limit.take(step, agreement.ask(step, used=step * 0.001).length)
    assert (step, exchanges < 60) == (1000, True)


def test_a_run_that_is_given_more_time_goes_on_from_its_end() -> None:
    limit = TimeLimit(seconds=20.0, most=10**9, lengths=[[5, 90], [100, 100]])
    limit.take(100, limit.estimate(100, used=10.0))
    assert (limit.lengths, limit.is_over(100)) == ([[5, 90], [100, 200]], False)


def test_a_step_beyond_the_estimate_does_not_end_a_run_that_has_time_left() -> None:
    limit = TimeLimit(seconds=10.0, most=10**9)
    limit.take(99, limit.estimate(99, used=9.9))
    limit.take(100, limit.estimate(100, used=9.901))
    assert (limit.lengths, limit.is_over(100)) == ([[99, 100], [100, 101]], False)


@pytest.mark.parametrize("value", ["0s", "0.0min", "5", "5m", "-3s", "5 min", "1d", "inf", "s", "1e3s", "5.5"])
def test_a_time_without_a_unit_or_length_is_refused_by_its_rule(value: str) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0 with its unit: 90s, 5min or 2h"):
        RunConfig.from_dict({"stop_after": yaml.safe_load(value)})


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("[]", "is not the record"),
        ('{"version": 1, "stop_after": "1s", "lengths": [[3, 9]]}', "of a run with stop_after=2s: its time is 1s"),
        ('{"version": 1, "stop_after": "2s", "lengths": [[3, 9], [2, 9]]}', "is no step with a length"),
        ('{"version": 1, "stop_after": "2s", "lengths": [["3", 9]]}', "is no step with a length"),
    ],
)
def test_a_file_that_is_no_record_of_this_time_is_refused(tmp_path: Path, content: str, rule: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigError, match=rule):
        read_record(tmp_path / "file", "2s")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["{_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}"])
def test_a_schedule_that_needs_the_number_of_steps_is_refused_by_name(tmp_path: Path, schedule: str) -> None:
    with pytest.raises(ConfigError, match=r"StepLR.*stop_after leaves open"):
        run(tmp_path / "a", *TIMED[:-2], "stop_after=1s", "schedule=null", f"+schedule={schedule}", "epochs=null")


PLACES: dict[str, tuple[str, ...]] = {
    "one_device": (),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "local_sgd": ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=4"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_run_ends_with_its_time_and_its_record_repeats_it_to_the_bit(tmp_path: Path, name: str) -> None:
    timed = (*TIMED, *PLACES[name], "eval.every_epochs=null")
    first = run(tmp_path / "first", *timed)
    lengths = record(tmp_path / "first")
    assert (first["status"], first["reason"]) == ("finished", "stop_after=0.2s")
    assert lengths[-1] == [first["steps"], first["steps"]]
    assert first["seconds"] >= 0.2
    assert "val/loss" in first["metrics"]
    again = run(tmp_path / "again", *timed, f"stop_after_record={tmp_path / 'first' / 'stop_after.json'}")
    assert again["weights_sha256"] == first["weights_sha256"]
    assert (again["steps"], again["fingerprint"]) == (first["steps"], first["fingerprint"])
    assert record(tmp_path / "again") == lengths


@pytest.mark.slow
def test_a_time_below_one_step_ends_after_one_step(tmp_path: Path) -> None:
    assert run(tmp_path / "run", *NET, "stop_after=0.000001s")["steps"] == 1


def test_a_time_of_the_command_line_replaces_epochs_of_a_recipe_and_not_those_beside_it() -> None:
    assert trainkit.compose(["recipe=digits", "stop_after=5min"]).cfg.epochs is None
    assert trainkit.compose(["recipe=digits", "stop_after=5min", "epochs=3"]).cfg.epochs == 3
    assert trainkit.compose(["recipe=digits", "stop_after=5min", "steps=3"]).cfg.steps == 3


@pytest.mark.slow
def test_steps_that_are_reached_first_end_the_run(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *NET, "stop_after=2h", "steps=5")
    assert (result["steps"], result["reason"]) == (5, "all steps done")


@pytest.mark.slow
def test_compiling_is_no_time_of_training(tmp_path: Path) -> None:
    result = run(tmp_path / "run", *TIMED, "compile.mode=default", "compile.backend=aot_eager")
    meta = json.loads((Path(result["last"]) / "meta.json").read_text())["state"]
    assert meta["compile_s"] > 0
    assert result["seconds"] - meta["compile_s"] == pytest.approx(0.2, abs=0.15)
    torch.compiler.reset()


SCRIPT = """
import sys, trainkit
if __name__ == "__main__":
    composition = trainkit.compose(sys.argv[2:], config_dirs=[{conf!r}], packages=["tests"])
    trainkit.train(composition, run_dir=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_time_that_is_left(tmp_path: Path) -> None:
    keys = [*QUIET, *NET, "stop_after=1.5s", "checkpoint.every_steps=100", "eval.every_epochs=null"]
    (tmp_path / "script.py").write_text(SCRIPT.format(conf=str(CONF)))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), *keys]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(command, env=environment)
    until = time.monotonic() + 100
    while not any((tmp_path / "run").glob("checkpoints/step_*/manifest.json")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result: dict[str, Any] = run(tmp_path / "run", *keys, "resume=auto")
    assert result["status"] == "finished"
    assert 1.5 <= result["seconds"] < 2.5
    saved = tmp_path / "run" / "stop_after.json"
    assert run(tmp_path / "again", *keys, f"stop_after_record={saved}")["weights_sha256"] == result["weights_sha256"]
    steps = result["steps"]
    (tmp_path / "run" / "result.json").unlink()
    assert run(tmp_path / "run", *keys, "resume=auto")["steps"] == steps  # no time is left
