"""Searches by Optuna: one that is resumed and draws its first points again is caught here alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.present import present
from tests.sweeps.support import trained

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

from trainkit.config.compose import Composer  # noqa: E402
from trainkit.config.schema import MonitoredMetric  # noqa: E402
from trainkit.config.sections import SweepConfig as Settings  # noqa: E402
from trainkit.errors import ConfigError  # noqa: E402
from trainkit.sweeps.job_sources import SweepJob  # noqa: E402
from trainkit.sweeps.spaces.trials import Trials, distributions, open_study  # noqa: E402

LOSS = MonitoredMetric(metric="val/loss", mode="min")
RATE = ("optimizer.lr=tag(log,interval(0.001,0.1))",)


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


class Bench:
    """A search in a folder, whose jobs this test plays."""

    def __init__(
        self, root: Path, composer: Composer, arguments: tuple[str, ...] = RATE, *, num_steps: int = 9, **settings: Any
    ) -> None:
        self.root, self.settings = root, Settings(**{"trials": 8, **settings})
        self.slots: list[int] = []
        self.study = open_study(root, settings=self.settings, goal=LOSS, num_steps=num_steps)
        space = composer.space(arguments)
        trials = present(self.settings.trials)
        self.source = Trials(study=self.study, space=space, trials=trials, goal=LOSS, job=self.job)

    def job(self, overrides: Sequence[str], number: int) -> SweepJob:
        folder = self.root / str(number)
        folder.mkdir(exist_ok=True)
        slots = self.slots[number] if self.slots else 1
        return SweepJob(name=str(number), folder=folder, overrides=tuple(overrides), command=(), slots=slots)

    def report(self, job: SweepJob, step: int, loss: float | None) -> bool:
        with (job.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "val/loss": loss}) + "\n")
        return self.source.watch(job)

    def ended(self, job: SweepJob, loss: float | None, code: int = 0) -> None:
        result = {"status": "finished" if code == 0 else "stopped", "metrics": {"val/loss": loss}}
        (job.folder / "result.json").write_text(json.dumps(result))
        self.source.ended(job, code)

    @property
    def states(self) -> list[TrialState]:
        return [trial.state for trial in self.study.get_trials(deepcopy=False)]


def run_to_end(bench: Bench, losses: Iterable[float]) -> None:
    """Play jobs that train to their end."""
    for number, loss in enumerate(losses):
        job = present(bench.source.next(1))
        for step in (1, 2, 3):
            assert not bench.report(job, step, loss / step), f"job {number} pruned"
        bench.ended(job, loss / 3)


def test_every_kind_of_axis_has_its_distribution(composer: Composer) -> None:
    zipped = ["batch.global_size=tag(zip,choice(32,64))", "batch.micro_size=tag(zip,choice(16,32))"]
    space = composer.space([*RATE, "epochs=int(interval(1,8))", "seed=range(0,50,10)", *zipped])
    assert distributions(space) == {
        "optimizer.lr": optuna.distributions.FloatDistribution(0.001, 0.1, log=True),
        "epochs": optuna.distributions.IntDistribution(1, 8),
        "seed": optuna.distributions.IntDistribution(0, 4),
        "batch.global_size batch.micro_size": optuna.distributions.CategoricalDistribution(["32 16", "64 32"]),
    }


@pytest.mark.slow
def test_a_search_proposes_points_of_its_space_until_it_has_tried_enough(tmp_path: Path, composer: Composer) -> None:
    zipped = ("seed=tag(zip,choice(1,2))", "epochs=tag(zip,choice(3,4))")
    bench = Bench(tmp_path, composer, (*zipped, "steps=range(10,30,10)", *RATE), trials=3)
    jobs = []
    while (job := bench.source.next(1)) is not None:
        jobs.append(job.overrides)
        bench.ended(job, 1.0)
    assert len(jobs) == 3
    for seed, epochs, steps, rate in jobs:
        assert (seed, epochs) in {("seed=1", "epochs=3"), ("seed=2", "epochs=4")}
        assert steps in {"steps=10", "steps=20"}
        assert 0.001 <= float(rate.partition("=")[2]) <= 0.1


@pytest.mark.slow
def test_a_point_that_does_not_fit_waits_while_a_narrower_one_runs(tmp_path: Path, composer: Composer) -> None:
    bench = Bench(tmp_path, composer, trials=3)
    bench.slots = [2, 1, 1]
    assert [job and job.name for job in map(bench.source.next, (1, 2, 1, 1))] == ["1", "0", "2", None]


@pytest.mark.slow
def test_a_job_below_the_median_of_its_step_is_pruned(tmp_path: Path, composer: Composer) -> None:
    bench = Bench(tmp_path, composer)
    run_to_end(bench, [0.3, 0.2, 0.1])
    job = present(bench.source.next(1))
    assert bench.report(job, 1, 0.9)
    assert bench.source.watch(job)  # asked again before it has ended: still
    bench.ended(job, 0.9, code=130)
    assert bench.states == [TrialState.COMPLETE] * 3 + [TrialState.PRUNED]


@pytest.mark.slow
def test_a_trial_reports_a_row_once_and_is_not_pruned_before_its_first_steps(
    tmp_path: Path, composer: Composer
) -> None:
    bench = Bench(tmp_path, composer, min_steps=2)
    run_to_end(bench, [0.3, 0.2, 0.1])
    job = present(bench.source.next(1))
    assert not bench.source.watch(job)
    assert not bench.report(job, 1, 0.9)
    assert bench.report(job, 2, 0.9)
    assert bench.study.get_trials(deepcopy=False)[3].intermediate_values == {1: 0.9, 2: 0.9}
    calm = Bench(tmp_path / "calm", composer, pruner="none")
    run_to_end(calm, [0.3, 0.2, 0.1])
    assert not calm.report(present(calm.source.next(1)), 1, 99.0)


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["halving", "hyperband"])
def test_a_job_is_pruned_at_a_rung_of_the_longest_training(tmp_path: Path, composer: Composer, pruner: str) -> None:
    bench = Bench(tmp_path, composer, pruner=pruner, trials=20, num_steps=9)
    for number in range(20):
        job = present(bench.source.next(1))
        hopeless = any(bench.report(job, step, 1.0 + number % 7) for step in (1, 3, 9))
        bench.ended(job, 1.0 + number % 7, code=130 if hopeless else 0)
    assert 0 < bench.states.count(TrialState.PRUNED) < 20


@pytest.mark.slow
def test_a_job_that_fails_or_has_no_figure_is_no_result(tmp_path: Path, composer: Composer) -> None:
    bench = Bench(tmp_path, composer)
    bench.ended(present(bench.source.next(1)), 0.5, code=1)
    bench.ended(present(bench.source.next(1)), None)
    assert bench.states == [TrialState.FAIL] * 2


@pytest.mark.slow
def test_a_killed_search_goes_on_with_what_it_had_begun(tmp_path: Path, composer: Composer) -> None:
    bench = Bench(tmp_path, composer, trials=4)
    run_to_end(bench, [0.3])
    job = present(bench.source.next(1))
    bench.report(job, 1, 0.5)
    bench.ended(job, 0.5, code=130)  # Ctrl-C: nobody had given it up
    again = Bench(tmp_path, composer, trials=4)
    same = present(again.source.next(1))
    assert (same.name, same.overrides) == (job.name, job.overrides)
    assert not again.report(same, 2, 0.4)  # step 1, which is in its file too, is not reported twice: Optuna would warn
    again.ended(same, 0.4)
    again.ended(present(again.source.next(1)), 0.2)
    again.ended(present(again.source.next(1)), 0.2)
    assert again.source.next(1) is None
    assert again.states == [TrialState.COMPLETE] * 4
    assert len({trial.params["optimizer.lr"] for trial in again.study.trials}) == 4  # no point of the first process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("seed=1,2", "seed=1,2,3"),
        ("seed=range(1,4)", "seed=range(2,5)"),  # the study holds positions alone
        ("epochs=int(interval(1,9))", "epochs=tag(log,int(interval(1,9)))"),
    ],
)
def test_a_search_over_other_values_is_refused_and_changes_no_trial(
    tmp_path: Path, composer: Composer, former: str, current: str
) -> None:
    bench = Bench(tmp_path, composer, (*RATE, former), trials=2)
    bench.ended(present(bench.source.next(1)), 0.5)
    with pytest.raises(ConfigError, match=r"sweep\.name=.* over other values of"):
        Bench(tmp_path, composer, (*RATE, current), trials=2)
    again = Bench(tmp_path, composer, (*RATE, former), trials=2)
    again.ended(present(again.source.next(1)), 0.4)
    assert again.states == [TrialState.COMPLETE] * 2


def test_a_search_by_another_metric_is_refused(tmp_path: Path, composer: Composer) -> None:
    bench = Bench(tmp_path, composer)
    goal = MonitoredMetric(metric="val/accuracy", mode="max")
    with pytest.raises(ConfigError, match=r"by val/loss \(min\), and this one is by val/accuracy \(max\)"):
        Trials(study=bench.study, space=composer.space(RATE), trials=2, goal=goal, job=bench.job)


def test_a_point_that_is_refused_counts_as_failed_and_the_next_is_proposed(tmp_path: Path, composer: Composer) -> None:
    def refusing(overrides: Sequence[str], number: int) -> SweepJob:
        raise ConfigError([])

    bench = Bench(tmp_path, composer, trials=2)
    source = Trials(study=bench.study, space=composer.space(RATE), trials=2, goal=LOSS, job=refusing)
    with pytest.raises(ConfigError):
        source.next(1)
    again = Bench(tmp_path, composer, trials=2)
    again.ended(present(again.source.next(1)), 0.4)
    assert again.states == [TrialState.FAIL, TrialState.COMPLETE]


@pytest.mark.long
def test_optuna_searches_from_the_command_line(cwd: Path) -> None:
    space = ["optimizer.lr=tag(log,interval(0.001,0.1))", "seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(3,4))"]
    trained(cwd, "-m", "hydra/sweeper=optuna", "sweep.trials=2", "sweep.name=search", *space)
    rows = json.loads((cwd / "outputs/sweeps/search/sweep.json").read_text())["jobs"]
    assert [row["exit_code"] for row in rows] == [0, 0]
    assert (cwd / "outputs/sweeps/search/optuna.db").is_file()
    trained(cwd, "-m", "hydra/sweeper=optuna", "sweep.trials=3", "sweep.name=search", *space)  # goes on with it
    again = json.loads((cwd / "outputs/sweeps/search/sweep.json").read_text())["jobs"]
    assert [row["overrides"][:3] for row in again[:2]] == [row["overrides"][:3] for row in rows]
    assert len(again) == 3
