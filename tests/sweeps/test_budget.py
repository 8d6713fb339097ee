"""The budget of a sweep: a job that starts, or goes on, after it is used up is caught here alone."""

import json
from pathlib import Path

import pytest

from tests.support.settings import latest
from tests.sweeps.support import FRAIL, POLITE, RUN, job, run, sweep_in
from trainkit.cli import main
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.sections import SweepConfig
from trainkit.errors import ConfigError
from trainkit.sweeps.budget import Budget
from trainkit.sweeps.launching import identity
from trainkit.sweeps.loop import STOPPED, Slots


def budget(text: str, *, price: float | None = None, on_gpus: bool = True) -> Budget:
    limit = Budget.of(RunConfig(sweep=SweepConfig(budget=text), hardware={"price_usd_h": price}), on_gpus=on_gpus)
    assert limit is not None
    return limit


def test_a_budget_counts_devices_dollars_or_the_clock() -> None:
    assert budget("4gpu_hours").share(elapsed_s=3600, device_s=2 * 3600) == 0.5
    assert budget("20usd", price=2.5).share(elapsed_s=0, device_s=4 * 3600) == 0.5
    assert budget("20usd", price=2.5, on_gpus=False).share(elapsed_s=4 * 3600, device_s=9e9) == 0.5
    assert budget("30min").share(elapsed_s=900, device_s=9e9) == 0.5


def test_a_budget_that_cannot_be_counted_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="counts GPUs, and there are none here"):
        budget("4gpu_hours", on_gpus=False)
    with pytest.raises(ConfigError, match="needs the price of a device"):
        budget("4usd")


def test_plans_that_pass_the_budget_are_refused_by_devices_and_by_the_clock() -> None:
    hours, clock = budget("4gpu_hours"), budget("1h")
    hours.refuse([(3600, 1)] * 4, slots=2, jobs=4)
    with pytest.raises(ConfigError, match=r"4 jobs take 2 times as much"):
        hours.refuse([(3600, 2)] * 4, slots=2, jobs=4)
    with pytest.raises(ConfigError, match=r"8 jobs take 2 times as much"):  # points that a search will draw
        hours.refuse([(3600, 1)], slots=2, jobs=8)
    clock.refuse([(1800, 1)] * 4, slots=2, jobs=4)
    with pytest.raises(ConfigError, match=r"1 jobs take 1.5 times as much"):
        clock.refuse([(5400, 1)], slots=8, jobs=1)


def test_a_budget_changes_neither_a_fingerprint_nor_a_job() -> None:
    cfg = RunConfig(sweep=SweepConfig(budget="30min"))
    assert (fingerprint(cfg), identity(cfg)) == (fingerprint(RunConfig()), identity(RunConfig()))


@pytest.mark.slow
def test_a_budget_that_is_used_up_stops_running_jobs_starts_no_other_and_counts_for_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(tmp_path, number, POLITE, config=str(number)) for number in range(3)]
    sweep = sweep_in(tmp_path, slots=Slots(count=2), budget=budget("1s"), retries=3)
    codes = run(sweep, *jobs)
    sweep.finish()
    assert ({*codes}, all(code in STOPPED for code in codes.values())) == ({"0", "1"}, True)
    out = capfd.readouterr().out
    assert "stopping: sweep.budget=1s is used up; 2 running, each saves first\n" in out
    assert " of 1s is used; go on with sweep.resume=" in out
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["budget"] == "1s"
    assert 1 <= record["spent"]["elapsed_s"] < record["spent"]["device_s"]
    assert run(sweep_in(tmp_path, budget=budget("1s")), job(tmp_path, 4, RUN, 0.5)) == codes
    assert run(sweep_in(tmp_path, budget=budget("1h")), job(tmp_path, 4, RUN, 0.5))["4"] == 0


@pytest.mark.slow
def test_a_job_that_fails_when_the_budget_is_used_up_is_not_tried_again(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path, budget=Budget(text="1s", limit_s=1e-6, of_devices=False), retries=3)
    run(sweep, job(tmp_path, 0, FRAIL, 9))
    assert sweep.record.rows["0"].tries == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (
            ("stop_after=5min", "sweep.budget=9min"),
            "sweep.budget=9min: is too small: the plans of 2 jobs take 1.11 times",
        ),
        (("steps=3", "sweep.budget=2usd"), "needs the price of a device"),
        (("steps=3", "sweep.budget=7"), "must be a number above 0 with its unit: 4gpu_hours, 20usd or 30min."),
        (("steps=3", "sweep.budget=0min"), "must be a number above 0 with its unit"),
    ],
)
def test_a_sweep_that_would_pass_its_budget_is_refused_before_a_job_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    rule: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("recipe=null", "callbacks=[]", "logger=[]", "seed=1,2", "sweep.slots=1")
    assert main(["-m", *latest(*common, *arguments)]) == 2
    assert rule in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/**/resolved.yaml"))
