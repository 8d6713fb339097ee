"""Successive halving: a resumed one that chooses another point is caught here alone."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.present import present
from tests.sweeps.support import trained
from trainkit.config.schema import MonitoredMetric
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.spaces.halving import Halving

LOSS = MonitoredMetric(metric="val/loss", mode="min")


class Runs:
    """Stands for the launcher: every job reaches its rung at once, with the loss that its point has there."""

    def __init__(self, root: Path, loss: Callable[[str, int], float | None], *, length: int = 9) -> None:
        self.root, self.loss, self.length = root, loss, length
        self.log: list[tuple[str, int | None]] = []

    def job(self, overrides: Sequence[str], number: int, *, going_on: SweepJob | None = None) -> SweepJob:
        folder = self.root / str(number) if going_on is None else going_on.folder
        return SweepJob(name=folder.name, folder=folder, overrides=tuple(overrides), command=tuple(overrides))

    def train(self, job: SweepJob) -> None:
        stop = next((int(line.partition("=")[2]) for line in job.command if line.startswith("stop_at")), None)
        self.log.append((job.name, stop))
        job.folder.mkdir(exist_ok=True)
        step = min(stop or self.length, self.length)
        with (job.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "val/loss": self.loss(job.overrides[0], step)}) + "\n")
        result = {"status": "finished" if step == self.length else "stopped", "steps": step}
        (job.folder / "result.json").write_text(json.dumps(result))

    def halving(self, points: Sequence[str], **settings: Any) -> Halving:
        known: dict[str, Any] = {"reduction": 3, "rungs": 3, "goal": LOSS} | settings
        lengths = [self.length] * len(points)
        return Halving(points=[(point,) for point in points], lengths=lengths, job=self.job, **known)

    def all_of(self, source: Halving, codes: Mapping[str, int] | None = None) -> list[tuple[str, int | None]]:
        while (job := source.next()) is not None:
            code = (codes or {}).get(job.name, 0)
            self.train(job)
            source.ended(job, code)
        assert source.exhausted
        return self.log


def by_number(point: str, step: int) -> float:
    """The last point is the best one."""
    return 1 / (1 + int(point[5:])) + 1 / step


def test_the_best_third_goes_on_until_one_trains_whole(tmp_path: Path) -> None:
    runs = Runs(tmp_path, by_number)
    log = runs.all_of(runs.halving([f"seed={number}" for number in range(9)]))
    assert log == [*((str(number), 1) for number in range(9)), ("6", 3), ("7", 3), ("8", 3), ("8", None)]


def test_a_job_that_goes_on_keeps_its_folder_and_shows_its_point_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path, by_number)
    source = runs.halving(["seed=0", "seed=1", "seed=2"], rungs=2)
    first = [present(source.next()) for _ in range(3)]
    assert [job.command for job in first] == [(f"seed={number}", "stop_at_step=3") for number in range(3)]
    assert source.next() is None  # no rung begins before the last has ended
    for job in first:
        runs.train(job)
        source.ended(job, 0)
    last = present(source.next())
    assert (last.folder, last.overrides, last.command) == (first[2].folder, ("seed=2",), ("seed=2",))


def test_the_choice_does_not_depend_on_which_job_ends_first(tmp_path: Path) -> None:
    runs = Runs(tmp_path, lambda point, step: 1.0)  # all equal: the earlier point goes on
    source = runs.halving(["seed=0", "seed=1", "seed=2"], rungs=2)
    jobs = [present(source.next()) for _ in range(3)]
    for job in reversed(jobs):
        runs.train(job)
        source.ended(job, 0)
    assert present(source.next()).name == "0"


def test_a_job_that_fails_or_whose_figure_is_no_number_does_not_go_on(tmp_path: Path) -> None:
    points = [f"seed={number}" for number in range(3)]
    (tmp_path / "failed").mkdir()
    failed = Runs(tmp_path / "failed", by_number)
    assert failed.all_of(failed.halving(points, rungs=2), codes={"2": 1})[3:] == [("1", None)]
    runs = Runs(tmp_path, lambda point, step: None if point == "seed=2" else by_number(point, step))
    assert runs.all_of(runs.halving(points, rungs=2))[3:] == [("1", None)]


def test_where_all_fail_the_sweep_ends(tmp_path: Path) -> None:
    runs = Runs(tmp_path, by_number)
    failed = {str(number): 1 for number in range(3)}
    assert len(runs.all_of(runs.halving([f"seed={number}" for number in range(3)]), codes=failed)) == 3


def test_a_killed_halving_goes_on_where_it_was_and_chooses_the_same(tmp_path: Path) -> None:
    points = [f"seed={number}" for number in range(9)]
    runs = Runs(tmp_path, by_number)
    source = runs.halving(points)
    for _ in range(9 + 2):  # the first rung, and two of the three jobs of the second
        job = present(source.next())
        runs.train(job)
        source.ended(job, 0)
    known = {
        (point,): SweepJob(name=str(number), folder=tmp_path / str(number), overrides=(point,), command=())
        for number, point in enumerate(points)
    }
    again = Runs(tmp_path, by_number)
    assert again.all_of(again.halving(points, known=known)) == [("8", 3), ("8", None)]


def test_a_point_that_stands_twice_runs_once_and_more_is_better_where_the_metric_says_so(tmp_path: Path) -> None:
    runs = Runs(tmp_path, by_number)
    goal = MonitoredMetric(metric="val/loss", mode="max")
    log = runs.all_of(runs.halving(["seed=0", "seed=1", "seed=1", "seed=2"], rungs=2, goal=goal))
    assert [name for name, _ in log] == ["0", "1", "2", "0"]


@pytest.mark.long
def test_the_winner_of_a_halving_is_the_training_that_nobody_interrupted(cwd: Path) -> None:
    rates = "optimizer.lr=0.1,0.03,0.003,0.0001"
    trained(cwd, "-m", "hydra/sweeper=halving", "sweep.reduction=2", "steps=40", rates, "sweep.name=halves")
    folder = cwd / "outputs/sweeps/halves"
    with (folder / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["finished", "pruned", "pruned", "pruned"]
    assert [row["steps"] for row in rows] == ["40", "20", "10", "10"]
    trained(cwd, "steps=40", f"optimizer.lr={rows[0]['optimizer.lr']}", "hydra.run.dir=whole")
    results = [json.loads((path / "result.json").read_text()) for path in (folder / rows[0]["folder"], cwd / "whole")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
