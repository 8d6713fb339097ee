"""The loop of a sweep, with jobs of milliseconds.

A job that outlives its killed sweep, or one that fails for a mistake and is tried again, is caught here alone.
Sweeps that are resumed: a finished job that runs twice, or one that is taken for finished, is caught here alone.
Sweeps from the command line, real trainings in real processes.

A killed sweep whose trainings end with other numbers, or a point that is trained twice, is caught here alone.
"""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_run_page import shown
from tests.support import quick
from tests.support.settings import latest
from tests.support.waiting import wait_for
from tests.sweeps.support import DEAF, FRAIL, POLITE, RUN, assert_ends, job, run, signalled, sweep_in
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.config.sections import EvalConfig
from trainkit.errors import ConfigError, HangupError, StoppedError, TerminatedError
from trainkit.sweeps.job_sources import JobList, SweepJob
from trainkit.sweeps.launching import identity
from trainkit.sweeps.loop import JobCommand, JobProcess, Slots, start_fresh
from trainkit.trainer.ownership import free_name, locked

COUNT = "import sys; open(sys.argv[1] + '/runs', 'a').write('x'); "


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def test_jobs_run_and_are_ranked_and_a_failed_one_says_where_to_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path)
    assert run(sweep, job(tmp_path, 0, RUN, 0.9), job(tmp_path, 2, "raise SystemExit('no luck')")) == {"0": 0, "2": 1}
    run(sweep, job(tmp_path, 1, RUN, 0.95))  # another batch of the same sweep
    sweep.finish()
    out = capfd.readouterr().out
    for line in (
        "job 0 (steps=0) starts\njob 0 (steps=0) done, ",
        f"job 2 (steps=2) failed: exit 1, no luck ({tmp_path}/2/output.log)\n",
        "\n3 jobs, 1 failed, by val/accuracy (max)\n",
        f"  1  1    finished  0.95          steps=1    1.0 s  {tmp_path}/1\n",
        "  the best point with other seeds: trainkit --allow-package tests -m epochs=1 steps=1 'seed=range(4)'\n",
        f"  page  {tmp_path}/report.html\n  leaderboard  {tmp_path}/leaderboard.md\n",
    ):
        assert line in out
    ranked = [line.split(",")[1:3] for line in (tmp_path / "leaderboard.csv").read_text().splitlines()[1:]]
    assert ranked == [["1", "finished"], ["0", "finished"], ["2", "exit 1"]]


def test_a_point_drawn_again_runs_once_and_is_reported_and_a_refused_one_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done, refused = job(tmp_path, 0, RUN, 0.9, config="a"), job(tmp_path, 1, f"{COUNT}sys.exit(2)", config="b")

    class Search(JobList):
        def __init__(self) -> None:
            super().__init__([])
            self._waiting.extend([done, done, refused, refused])

    sweep = sweep_in(tmp_path)
    sweep.run(Search())
    out = capfd.readouterr().out
    assert [out.count(f"equals job {name}, which runs only once") for name in ("0", "1")] == [1, 1]
    assert sweep.exit_codes == {"0": 0, "1": 2}
    assert (tmp_path / "1/runs").read_text() == "x"


def test_a_page_that_cannot_be_written_ends_no_sweep_and_one_that_nobody_wants_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = sweep_in(tmp_path)
    run(sweep, job(tmp_path, 0, RUN, 0.9))
    monkeypatch.setattr("trainkit.sweeps.results.comparing.write_page", lambda *_: 1 / 0)
    sweep.finish()
    assert "report.html cannot be written: ZeroDivisionError" in caplog.text
    assert "  leaderboard  " in capfd.readouterr().out
    caplog.clear()
    with (tmp_path / "0/resolved.yaml").open("a") as file:
        file.write("\nreport_page: false\n")
    sweep.finish()
    assert caplog.text == ""


def test_a_failed_job_stops_the_others_where_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path, slots=Slots(count=2), on_error="stop")
    fails = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\nsys.exit(1)"
    failing = job(tmp_path, 0, fails, tmp_path / "1/here")
    assert run(sweep, failing, job(tmp_path, 1, POLITE), job(tmp_path, 2, RUN, 0.9)) == {"0": 1, "1": 130}
    assert "stopping: 1 running, each saves first (sweep.on_error=stop)" in capfd.readouterr().out
    run(sweep, job(tmp_path, 3, RUN, 0.9))
    assert not (tmp_path / "3").exists()


def test_a_job_that_dies_is_tried_again_from_its_checkpoint_as_often_as_is_said(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path, retries=2)
    dies, resumes = job(tmp_path, 0, FRAIL, 3), job(tmp_path, 1, FRAIL + "else: print(sys.argv[3:])", 2)
    assert run(sweep, dies, resumes) == {"0": -9, "1": 0}
    assert [row["tries"] for row in rows(tmp_path).values()] == [3, 3]
    assert (tmp_path / "1/output.log").read_text() == "['resume=auto']\n"


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    run(sweep_in(tmp_path, retries=3), *(job(tmp_path, code, f"raise SystemExit({code})") for code in (2, 3)))
    assert [(row["exit_code"], row["tries"]) for row in rows(tmp_path).values()] == [(2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, StoppedError), (signal.SIGTERM, TerminatedError), (signal.SIGHUP, HangupError)],
)
@pytest.mark.slow
def test_a_signal_stops_all_jobs_in_good_order_and_ends_the_sweep(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int, error: type[Exception]
) -> None:
    sweep = sweep_in(tmp_path, slots=Slots(count=2))
    sender = signalled(tmp_path / "1/here", number)
    with pytest.raises(error, match=rf"2 of 3 jobs were started.* sweep\.resume={tmp_path}$"):
        run(sweep, *(job(tmp_path, number, POLITE) for number in range(2)), job(tmp_path, 2, RUN, 0.9))
    sender.join()
    assert sweep.exit_codes == {"0": 130, "1": 130}
    sweep.finish()
    assert "\n3 jobs, 2 stopped, 1 not run, by val/loss (min)\n" in capfd.readouterr().out


def test_a_narrow_job_starts_at_once_in_a_gap_that_a_wide_one_leaves(tmp_path: Path) -> None:
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
    wide = [job(tmp_path, number, waits, tmp_path / "2/runs", slots=2) for number in range(2)]
    assert run(sweep_in(tmp_path, slots=Slots(count=3)), *wide, job(tmp_path, 2, COUNT)) == {"0": 0, "1": 0, "2": 0}


def test_a_job_that_will_not_stop_is_ended(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    sender = signalled(tmp_path / "0/here", signal.SIGINT, signal.SIGINT, signal.SIGINT)
    with pytest.raises(StoppedError):
        run(sweep, job(tmp_path, 0, DEAF))
    sender.join()
    assert sweep.exit_codes == {"0": -signal.SIGKILL}


def test_the_search_stops_a_job_in_good_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Search(JobList):
        heard: tuple[tuple[str, int], ...] = ()

        def watch(self, job: SweepJob) -> bool:
            return job.name == "0" and (job.folder / "here").exists()

        def ended(self, job: SweepJob, code: int) -> None:
            self.heard += ((job.name, code),)

    sweep, search = sweep_in(tmp_path), Search([job(tmp_path, 0, POLITE), job(tmp_path, 1, RUN, 0.9)])
    sweep.run(search)
    assert search.heard == (("0", 130), ("1", 0))
    assert [row["pruned"] for row in rows(tmp_path).values()] == [True, False]
    assert "job 0 (steps=0) pruned, " in capfd.readouterr().out


def test_a_file_of_the_user_with_the_name_of_a_leaderboard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leaderboard.csv").write_text("mine")
    with pytest.raises(ConfigError, match="was not written by a sweep"):
        sweep_in(tmp_path)


def test_two_sweeps_never_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock"), pytest.raises(ConfigError, match="in use by process"):
        run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.9))
    assert not (tmp_path / "0").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_sweep_that_is_killed_leaves_no_job_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.sweeps.support import *;"
        "from trainkit.sweeps.loop import Slots;"
        "place = Path(sys.argv[1]); hang = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)';"
        "run(sweep_in(place, slots=Slots(count=2)), job(place, 0, hang), job(place, 1, hang))"
    )
    logs = [tmp_path / name / "output.log" for name in "01"]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL) as sweep:
        wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
        sweep.kill()
    for log in logs:
        assert_ends(int(log.read_text()))


def test_a_folder_of_an_earlier_sweep_is_left_alone(tmp_path: Path) -> None:
    assert free_name(tmp_path / "0") == tmp_path / "0"
    (tmp_path / "0").mkdir()
    (tmp_path / "0-2").mkdir()
    assert free_name(tmp_path / "0", [tmp_path / "0-3"]) == tmp_path / "0-4"


SLOW = "import time; time.sleep(0.2)\n" + RUN
LONG_ENOUGH = 8


def slow_jobs(folder: Path) -> list[SweepJob]:
    return [job(folder, number, SLOW, number / 10, "ran", config=f"config {number}") for number in range(LONG_ENOUGH)]


def board(folder: Path) -> list[tuple[str, str, str, str]]:
    with (folder / "leaderboard.csv").open() as file:
        return [(row["job"], row["status"], row["val/accuracy"], row["steps"]) for row in csv.DictReader(file)]


def times_run(folder: Path, number: int) -> int:
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
    lines = f"job 0 (steps=0): already has a result, in {tmp_path}/0\njob 1 (steps=1) goes on\njob 1 (steps=1) done, "
    assert capfd.readouterr().out.startswith(lines)
    file = tmp_path / "sweep.json"  # killed before the end of its process was noted
    file.write_text(file.read_text().replace('"exit_code": 0', '"exit_code": null', 1))
    assert run(sweep_in(tmp_path), jobs[0])["0"] == 0
    assert times_run(tmp_path, 0) == 1
    run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.5, "ran", config="another"))
    assert times_run(tmp_path, 0) == 2


def test_jobs_of_an_earlier_sweep_that_gave_nothing_are_forgotten(tmp_path: Path) -> None:
    run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.5, config="a"), job(tmp_path, 1, FRAIL, 1, config="b"))
    sweep = sweep_in(tmp_path)
    run(sweep, job(tmp_path, 2, RUN, 0.6, config="c"))
    sweep.record.forget_others(sweep.requested)
    assert list(sweep.record.rows) == ["0", "2"]


@pytest.mark.parametrize("moment", [random.uniform(0.2, 0.9)], ids=["once"])
def test_a_sweep_that_is_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path: Path, moment: float) -> None:
    folder, calm = tmp_path / "killed", tmp_path / "calm"
    code = (
        "import sys; from pathlib import Path; from tests.sweeps.test_jobs import *; folder = Path(sys.argv[1])\n"
        "run(sweep_in(folder, slots=Slots(count=2)), *slow_jobs(folder))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.DEVNULL) as sweep:
        wait_for((folder / "sweep.json").exists)
        time.sleep(moment)
        sweep.kill()
    had = [number for number in range(LONG_ENOUGH) if (folder / str(number) / "result.json").exists()]
    assert len(had) < LONG_ENOUGH, f"killed too late, after {moment} s"
    assert set(run(sweep_in(folder, slots=Slots(count=2)), *slow_jobs(folder)).values()) == {0}
    assert [times_run(folder, number) for number in had] == [1] * len(had)
    run(sweep_in(calm, slots=Slots(count=2)), *slow_jobs(calm))
    assert board(folder) == board(calm)


SHORT = ("recipe=null", "callbacks=[]", "logger=[]", "sweep.name=mine")


def command(*arguments: str) -> list[str]:
    return quick.command("-m", *latest(*SHORT, *arguments))


def swept(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    return done


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["jobs"]
    return rows


def test_a_sweep_from_the_command_line(cwd: Path) -> None:
    done = subprocess.run(
        quick.command("-m", "recipe=null", "steps=12", "callbacks=[]", "logger=[]",
            "sweep.name=rates", "eval.metric=val/accuracy", "optimizer.lr=1e30,0.01"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    folder = cwd / "outputs/sweeps/rates"
    assert done.returncode == 1, done.stderr
    with (folder / "leaderboard.csv").open() as file:
        jobs_of = [(row["job"], row["status"], row["optimizer.lr"], row["folder"]) for row in csv.DictReader(file)]
    assert jobs_of == [("1", "finished", "0.01", "1"), ("0", "failed", "1e+30", "0")]
    lines = done.stdout.splitlines()
    assert "2 jobs, 1 failed, by val/loss (min)" in lines
    assert lines[-2:] == [
        "  page  outputs/sweeps/rates/report.html",
        "  leaderboard  outputs/sweeps/rates/leaderboard.md",
    ]
    assert [run["name"] for run in shown(folder / "report.html")["runs"]] == ["0", "1"]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"0", "1"}


def test_jobs_of_one_process_and_of_two_share_the_slots_and_the_same_point_runs_once(cwd: Path) -> None:
    done = swept("strategy=one_device,mirrored", "seed=1,1", "steps=2", "sweep.slots=2")
    folder = cwd / "outputs/sweeps/mine"
    assert [(row["job"], row["slots"], row["exit_code"]) for row in jobs_of(folder)] == [("0", 1, 0), ("2", 2, 0)]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "2"]
    assert "strategy=mirrored seed=1: equals job 2, which runs only once\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
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
    cwd: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["-m", *latest(*SHORT[:-1], "seed=1,2", *arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not list(cwd.glob("outputs/**/resolved.yaml"))
