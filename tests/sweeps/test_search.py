from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import quick
from tests.sweeps.support import sweep_in
from trainkit.config.compose import Composer
from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import SweepConfig as Settings
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.results.job_results import read_entries

ACCURACY = MonitoredMetric(metric="val/accuracy", mode="max")

TRAIN = """
import json, pathlib, signal, sys, time
folder, good = pathlib.Path(sys.argv[1]), sys.argv[2] == "good"
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
folder.mkdir(exist_ok=True)
(folder / "resolved.yaml").write_text("eval: {metric: val/accuracy}")
with open(folder / "metrics.jsonl", "w") as rows:
    rows.write(json.dumps({"step": 1, "val/accuracy": 0.9 if good else 0.1}) + "\\n")
while not good and not stopped: time.sleep(0.01)
status = "stopped" if stopped else "finished"
metrics = {"val/accuracy": 0.95 if good else 0.1}
result = {"status": status, "metrics": metrics, "steps": 1 if stopped else 2, "seconds": 1}
(folder / "result.json").write_text(json.dumps(result))
sys.exit(130 if stopped else 0)
"""
"""A job that is good and finishes, or is bad and trains until it is stopped."""


@pytest.mark.slow
def test_a_hopeless_job_is_stopped_in_good_order_and_counts_as_pruned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    from trainkit.sweeps.spaces.trials import Trials, open_study

    def job(overrides: Sequence[str], number: int, *, going_on: SweepJob | None = None) -> SweepJob:
        word = "good" if number < 3 else "bad"
        folder = tmp_path / str(number)
        command = (sys.executable, "-c", TRAIN, str(folder), word)
        return SweepJob(name=str(number), folder=folder, overrides=tuple(overrides), command=command)

    study = open_study(tmp_path, settings=Settings(trials=5), goal=ACCURACY, num_steps=9)
    space = Composer().space(["optimizer.lr=interval(0,1)"])
    sweep = sweep_in(tmp_path)
    sweep.run(Trials(study=study, space=space, trials=5, goal=ACCURACY, job=job))
    sweep.finish()
    assert [entry.status for entry in read_entries(tmp_path)] == ["finished"] * 3 + ["pruned"] * 2
    assert "5 jobs, 2 pruned, by val/accuracy (max)" in capfd.readouterr().out
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3 + ["PRUNED"] * 2


def trained(cwd: Path, *arguments: str) -> None:
    common = ["recipe=null", "callbacks=[]", "logger=[]", "eval.metric=val/accuracy"]
    done = subprocess.run(quick.command(*arguments, *common), capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_winner_of_a_halving_is_the_training_that_nobody_interrupted(cwd: Path) -> None:
    rates = "optimizer.lr=0.1,0.03,0.003,0.0001"
    trained(cwd, "-m", "hydra/sweeper=halving", "sweep.reduction=2", "steps=40", rates, "sweep.name=halves")
    folder = cwd / "outputs/sweeps/halves"
    with (folder / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], row["steps"]) for row in rows] == [
        ("finished", "40"),
        ("pruned", "20"),
        ("pruned", "10"),
        ("pruned", "10"),
    ]
    trained(cwd, "steps=40", f"optimizer.lr={rows[0]['optimizer.lr']}", "hydra.run.dir=whole")
    results = [json.loads((path / "result.json").read_text()) for path in (folder / rows[0]["folder"], cwd / "whole")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


@pytest.mark.long
def test_optuna_searches_from_the_command_line(cwd: Path) -> None:
    pytest.importorskip("optuna")
    space = ["optimizer.lr=tag(log,interval(0.001,0.1))", "seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(3,4))"]
    trained(cwd, "-m", "hydra/sweeper=optuna", "sweep.trials=2", "sweep.name=search", *space)
    rows = json.loads((cwd / "outputs/sweeps/search/sweep.json").read_text())["jobs"]
    assert [row["exit_code"] for row in rows] == [0, 0]
    assert (cwd / "outputs/sweeps/search/optuna.db").is_file()
    trained(cwd, "-m", "hydra/sweeper=optuna", "sweep.trials=3", "sweep.name=search", *space)  # goes on with it
    again = json.loads((cwd / "outputs/sweeps/search/sweep.json").read_text())["jobs"]
    assert [row["overrides"][:3] for row in again[:2]] == [row["overrides"][:3] for row in rows]
    assert len(again) == 3
