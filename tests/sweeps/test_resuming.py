"""Sweeps that are resumed: a finished job that runs twice, or one that is taken for finished, is caught here alone."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweeps.support import FRAIL, RUN, job, run, sweep_in
from trainkit.config.schema import RunConfig
from trainkit.config.sections import EvalConfig
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.launching import identity
from trainkit.sweeps.loop.processes import JobCommand, JobProcess, start_fresh
from trainkit.sweeps.loop.slots import Slots

SLOW = "import time; time.sleep(0.2)\n" + RUN
LONG_ENOUGH = 8


def slow_jobs(folder: Path) -> list[SweepJob]:
    return [job(folder, number, SLOW, number / 10, "ran", config=f"config {number}") for number in range(LONG_ENOUGH)]


def board(folder: Path) -> list[tuple[str, str, str, str]]:
    with (folder / "leaderboard.csv").open() as file:
        return [(row["job"], row["status"], row["val/accuracy"], row["seed"]) for row in csv.DictReader(file)]


def runs(folder: Path, number: int) -> int:
    file = folder / str(number) / "runs"
    return file.read_text().count("ran") if file.exists() else 0


def test_what_is_shown_sets_no_job_apart_and_where_it_runs_does() -> None:
    plain = RunConfig()
    assert identity(plain) == identity(RunConfig(name="other", eval=EvalConfig(every_epochs=2)))
    assert identity(plain) != identity(RunConfig(stop_at_step=3))
    assert identity(plain) != identity(RunConfig(steps=3))


def test_a_job_is_noted_before_it_starts(tmp_path: Path) -> None:
    """A sweep that is killed right after the start must find the job's result, and not train it again."""
    tries = list[int]()

    def start(command: JobCommand) -> JobProcess:
        tries.extend(row["tries"] for row in json.loads((tmp_path / "sweep.json").read_text())["jobs"])
        return start_fresh(command)

    run(sweep_in(tmp_path, start=start), job(tmp_path, 0, RUN, 0.5, config="a"))
    assert tries == [1]


def test_a_finished_job_is_not_run_again_and_a_failed_one_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job(tmp_path, 0, RUN, 0.5, "ran", config="a"), job(tmp_path, 1, FRAIL, 1, config="b")]
    assert run(sweep_in(tmp_path), *jobs) == {"0": 0, "1": -9}
    capfd.readouterr()
    assert run(sweep_in(tmp_path), *jobs) == {"0": 0, "1": 0}
    told = f"job 0 (seed=0): already has a result, in {tmp_path}/0\njob 1 (seed=1) goes on\njob 1 (seed=1) done, "
    assert capfd.readouterr().out.startswith(told)
    file = tmp_path / "sweep.json"  # killed before the end of its process was noted
    file.write_text(file.read_text().replace('"exit_code": 0', '"exit_code": null', 1))
    assert run(sweep_in(tmp_path), jobs[0])["0"] == 0
    assert runs(tmp_path, 0) == 1
    run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.5, "ran", config="another"))
    assert runs(tmp_path, 0) == 2


def test_jobs_of_an_earlier_sweep_that_gave_nothing_are_forgotten(tmp_path: Path) -> None:
    run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.5, config="a"), job(tmp_path, 1, FRAIL, 1, config="b"))
    sweep = sweep_in(tmp_path)
    run(sweep, job(tmp_path, 2, RUN, 0.6, config="c"))
    sweep.record.forget_others(sweep.requested)
    assert list(sweep.record.rows) == ["0", "2"]


@pytest.mark.parametrize("moment", [random.uniform(0.2, 0.9)], ids=["once"])
def test_a_sweep_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path: Path, moment: float) -> None:
    place, calm = tmp_path / "killed", tmp_path / "calm"
    code = (
        "import sys; from pathlib import Path; from tests.sweeps.test_resuming import *; place = Path(sys.argv[1])\n"
        "run(sweep_in(place, slots=Slots(count=2)), *slow_jobs(place))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.DEVNULL) as sweep:
        while not (place / "sweep.json").exists():
            time.sleep(0.01)
        time.sleep(moment)
        sweep.kill()
    had = [number for number in range(LONG_ENOUGH) if (place / str(number) / "result.json").exists()]
    assert len(had) < LONG_ENOUGH, f"killed too late, after {moment} s"
    again = sweep_in(place, slots=Slots(count=2))
    assert set(run(again, *slow_jobs(place)).values()) == {0}
    assert [runs(place, number) for number in had] == [1] * len(had)
    undisturbed = sweep_in(calm, slots=Slots(count=2))
    run(undisturbed, *slow_jobs(calm))
    assert board(place) == board(calm)
