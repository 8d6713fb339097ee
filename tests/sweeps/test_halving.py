"""Successive halving: a resumed one that chooses another point is caught here alone.
The points of a sweep: a draw outside its interval, or one that changes with the number of trials, is caught here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.present import present
from tests.sweeps.support import trained
from trainkit.config.compose import Composer
from trainkit.config.schema import MonitoredMetric
from trainkit.errors import ConfigError
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.spaces import request as drawing
from trainkit.sweeps.spaces.halving import Halving
from trainkit.sweeps.spaces.request import read_request

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
        while (job := source.next(1)) is not None:
            code = (codes or {}).get(job.name, 0)
            self.train(job)
            source.ended(job, code)
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
    first = [present(source.next(1)) for _ in range(3)]
    assert [job.command for job in first] == [(f"seed={number}", "stop_at_step=3") for number in range(3)]
    assert source.next(1) is None  # no rung begins before the last has ended
    for job in first:
        runs.train(job)
        source.ended(job, 0)
    last = present(source.next(1))
    assert (last.folder, last.overrides, last.command) == (first[2].folder, ("seed=2",), ("seed=2",))


def test_the_choice_does_not_depend_on_which_job_ends_first(tmp_path: Path) -> None:
    runs = Runs(tmp_path, lambda point, step: 1.0)  # all equal: the earlier point goes on
    source = runs.halving(["seed=0", "seed=1", "seed=2"], rungs=2)
    jobs = [present(source.next(1)) for _ in range(3)]
    for job in reversed(jobs):
        runs.train(job)
        source.ended(job, 0)
    assert present(source.next(1)).name == "0"


def test_a_job_that_fails_or_whose_figure_is_no_number_does_not_go_on(tmp_path: Path) -> None:
    points = [f"seed={number}" for number in range(3)]
    (tmp_path / "failed").mkdir()
    failed = Runs(tmp_path / "failed", by_number)
    assert failed.all_of(failed.halving(points, rungs=2), codes={"2": 1})[3:] == [("1", None)]
    runs = Runs(tmp_path, lambda point, step: None if point == "seed=2" else by_number(point, step))
    assert runs.all_of(runs.halving(points, rungs=2))[3:] == [("1", None)]


def test_a_killed_halving_goes_on_where_it_was_and_chooses_the_same(tmp_path: Path) -> None:
    points = [f"seed={number}" for number in range(9)]
    runs = Runs(tmp_path, by_number)
    source = runs.halving(points)
    for _ in range(9 + 2):  # the first rung, and two of the three jobs of the second
        job = present(source.next(1))
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


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def refused_point(composer: Composer, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _ = read_request(composer, arguments).points
    return [str(problem) for problem in caught.value.problems]


def test_keys_that_are_zipped_move_together_beside_a_plain_grid(composer: Composer) -> None:
    rates, widths = "optimizer.lr=tag(zip,range(1,3))", "model.hidden=tag(zip,choice([64],[256]))"
    assert composer.points([rates, "optimizer=tag(zip,choice(sgd,adamw))", "seed=1,2", widths, "epochs=1"]) == [
        ["optimizer.lr=1", "optimizer=sgd", "seed=1", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=1", "optimizer=sgd", "seed=2", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=2", "optimizer=adamw", "seed=1", "model.hidden=[256]", "epochs=1"],
        ["optimizer.lr=2", "optimizer=adamw", "seed=2", "model.hidden=[256]", "epochs=1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("+seed=3", "seed=1,2"), ["seed: is given twice"]),
        (("seed=range(5,1)",), ["seed=range(5,1): is an empty sweep"]),
        (("seed=range(0,1,0)",), ["step other than 0"]),
        (("seed=tag(zap,choice(1,2))",), ["Did you mean zip?"]),
        (("seed=tag(zip,choice(1,2))",), ["no other key has the tag"]),
        (("seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2,3))"), ["has 3 values, and seed"]),
        (("optimizer.lr=interval(0.1,1)",), ["needs a sweeper that searches"]),
        (
            ("seed=tag(log,choice(1,2))", "optimizer.lr=tag(log,interval(0,1))"),
            ["log goes with an interval", "an interval above 0"],
        ),
        (("optimizer.lr=tag(zip,interval(0.1,1))",), ["zip goes with listed values"]),
        (("optimizer.lr=interval(1,0.1)",), ["the low end, 1, is not below the high end, 0.1"]),
        (("hydra/sweeper=rndom", "seed=1,2"), ["Did you mean random?"]),
        (("sweep.name=a,b",), ["sweep.name=a,b: "]),
        (("hydra/sweeper=random",), ["sweep.trials: needs", "has nothing to search"]),
        (("hydra/sweeper=halving", "seed=1,2", "stop_at_step=3"), ["stop_at_step=3: is set by", "has 2 points"]),
        (("hydra/sweeper=halving", "seed=range(9)", "sweep.rungs=4"), ["Use 3 or less"]),
        (("hydra/sweeper=halving", "optimizer.lr=interval(0.1,1)"), ["sweep.trials: needs"]),
        (("hydra/sweeper=basic", "seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2))"), ["vary keys together"]),
    ],
)
def test_what_cannot_be_searched_is_refused_by_its_key(
    composer: Composer, arguments: tuple[str, ...], words: list[str]
) -> None:
    found = refused_point(composer, *arguments)
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found


def test_the_error_of_an_absent_optuna_names_the_command_that_installs_it(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = refused_point(composer, "hydra/sweeper=optuna", "sweep.trials=3", "seed=1,2")
    assert 'pip install "optuna' in problem


def drawn(composer: Composer, *arguments: str, trials: int) -> list[list[str]]:
    return drawing.sample(composer.space(arguments), trials=trials, seed=7)


def test_random_points_lie_in_their_space_and_follow_the_log(composer: Composer) -> None:
    rates = [
        float(line.partition("=")[2])
        for (line,) in drawn(composer, "optimizer.lr=tag(log,interval(0.0001,1))", trials=2000)
    ]
    assert all(0.0001 <= rate <= 1 for rate in rates)
    # Half of the draws of a logarithm lie below its middle, 0.01; the share of 2,000 has a deviation of 0.011.
    assert abs(sum(rate < 0.01 for rate in rates) / 2000 - 0.5) < 5 * 0.0112


def test_whole_numbers_have_both_ends_of_their_interval(composer: Composer) -> None:
    assert {line for (line,) in drawn(composer, "seed=int(interval(1,3))", trials=60)} == {"seed=1", "seed=2", "seed=3"}


def test_more_trials_keep_the_first_ones_and_zipped_keys_together(composer: Composer) -> None:
    arguments = ("seed=tag(zip,choice(1,2))", "epochs=tag(zip,choice(1,2))", "optimizer.lr=interval(0,1)")
    ten = drawn(composer, *arguments, trials=10)
    assert drawn(composer, *arguments, trials=4) == ten[:4]
    assert {(line[0], line[1]) for line in ten} == {("seed=1", "epochs=1"), ("seed=2", "epochs=2")}
    assert len({line[2] for line in ten}) == 10


def test_the_corners_of_a_space_hold_every_value(composer: Composer) -> None:
    space = composer.space(["seed=1,2,3", "optimizer.lr=interval(0.1,1)"])
    assert space.corners() == [
        ["seed=1", "optimizer.lr=0.1"],
        ["seed=2", "optimizer.lr=1.0"],
        ["seed=3", "optimizer.lr=1.0"],
    ]
