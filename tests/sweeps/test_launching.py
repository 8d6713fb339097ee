"""Sweeps from the command line, real trainings in real processes.

A killed sweep whose trainings end with other numbers, or a point that is trained twice, is caught here alone.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_run_page import shown
from tests.support import quick
from tests.support.settings import latest
from trainkit.cli import main

SHORT = ("recipe=null", "callbacks=[]", "logger=[]", "sweep.name=mine")


def command(*arguments: str) -> list[str]:
    return quick.command("-m", *latest(*SHORT, *arguments))


def swept(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    return done


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["jobs"]
    return found


def metrics(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / "leaderboard.csv").open() as file:
        return [(row["job"], row["status"], row["val/loss"]) for row in csv.DictReader(file)]


def children() -> list[list[str]]:
    """Processes on this machine that work in a sweep of this test.

    Not the one of pytest, whose command names trainkit if the checkout is in a folder of this name.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            words = (process / "cmdline").read_text().split("\0")
            if (process / "cwd").readlink() == Path.cwd() and "trainkit" in " ".join(words):
                found.append(words)
        except OSError:
            continue
    return found


def test_a_sweep_from_the_command_line(cwd: Path) -> None:
    done = subprocess.run(
        quick.command("-m", "recipe=null", "steps=12", "callbacks=[]", "logger=[]",
            "sweep.name=rates", "eval.metric=val/accuracy", "optimizer.lr=1e30,0.01"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    folder = cwd / "outputs/sweeps/rates"
    assert done.returncode == 1, done.stderr
    with (folder / "leaderboard.csv").open() as file:
        rows = [(row["job"], row["status"], row["optimizer.lr"], row["folder"]) for row in csv.DictReader(file)]
    assert rows == [("1", "finished", "0.01", "1"), ("0", "failed", "1e+30", "0")]
    lines = done.stdout.splitlines()
    assert "2 jobs, 1 failed, by val/accuracy (max)" in lines
    assert lines[-2:] == [
        "  page  outputs/sweeps/rates/report.html",
        "  leaderboard  outputs/sweeps/rates/leaderboard.md",
    ]
    assert [run["name"] for run in shown(folder / "report.html")["runs"]] == ["0", "1"]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"0", "1"}
    assert (folder / "leaderboard.png").exists()


def test_jobs_of_one_process_and_of_two_share_the_slots_and_the_same_point_runs_once(cwd: Path) -> None:
    done = swept("strategy=one_device,mirrored", "seed=1,1", "steps=2", "sweep.slots=2")
    folder = cwd / "outputs/sweeps/mine"
    found = [(row["job"], row["slots"], row["exit_code"]) for row in rows(folder)]
    assert found == [("0", 1, 0), ("2", 2, 0)]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "2"]
    assert "strategy=mirrored seed=1: equals job 2, which runs only once\n" in done.stdout
    assert not children()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("sweep.slots=1,2",), "sweep.slots=1,2: is about the sweep as a whole"),
        (("sweep.name=mine", "sweep.resume=gone"), "sweep.name=mine: has no effect with sweep.resume"),
        (("sweep.resume=gone",), "is not the folder of a sweep"),
        (("hydra/launcher=basic", "sweep.retries=1"), "sweep.retries=1: has no effect with hydra/launcher=basic"),
        (("hydra/launcher=submitit_local", "sweep.slots=3"), "Give hydra.launcher.jobs_at_once"),
        (("eval.metric=val/f1",), "There are: val/loss, val/accuracy"),
        (("strategy=mirrored", "strategy.replicas=4", "sweep.slots=2"), "seed=1 takes 4 slots"),
    ],
)
def test_what_a_sweep_cannot_mean_is_refused_before_a_job_starts(
    cwd: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    assert main(["-m", *latest(*SHORT[:-1], "seed=1,2", *arguments)]) == 2
    assert word in capsys.readouterr().err
    assert not list(cwd.glob("outputs/**/resolved.yaml"))


@pytest.mark.long
def test_a_killed_sweep_of_trainings_goes_on_as_if_nothing_had_happened(cwd: Path) -> None:
    points = ("seed=1,2,3,4", "steps=400", "checkpoint.every_steps=50", "log_every_steps=5", "loader.cache=false")
    folder = cwd / "outputs/sweeps/mine"
    with subprocess.Popen(command(*points), stdout=subprocess.DEVNULL) as sweep:
        while not list(folder.glob("1/checkpoints/step_*/manifest.json")):
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
    had = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    deadline = time.monotonic() + 60
    while children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not children()
    assert len(had) < 4
    resumed = swept(*points).stdout
    assert "goes on: the run was killed" in resumed
    assert {name: (folder / name / "result.json").stat().st_mtime_ns for name in had} == had
    calm = swept(*points, "sweep.name=calm")
    assert calm.returncode == 0
    assert metrics(folder) == metrics(cwd / "outputs/sweeps/calm")
