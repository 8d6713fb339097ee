"""The loop of a sweep, with jobs of milliseconds.

A job that outlives its killed sweep, or one that fails for a mistake and is tried again, is caught here alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps.support import DEAF, FRAIL, POLITE, RUN, assert_ends, job, run, signalled, sweep_in
from trainkit.errors import ConfigError, HangupError, StoppedError, TerminatedError
from trainkit.sweeps.job_sources import JobList, SweepJob
from trainkit.sweeps.loop.slots import Slots
from trainkit.trainer.ownership import free_name, locked

COUNT = "import sys; open(sys.argv[1] + '/runs', 'a').write('x'); "


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def test_jobs_run_and_are_ranked_and_a_failed_one_says_where_to_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path)
    failing = job(tmp_path, 2, "raise SystemExit('no luck')")
    assert run(sweep, job(tmp_path, 0, RUN, 0.9), failing) == {"0": 0, "2": 1}
    run(sweep, job(tmp_path, 1, RUN, 0.95))  # another batch of the same sweep
    sweep.finish()
    out = capfd.readouterr().out
    for line in (
        "job 0 (seed=0) starts\njob 0 (seed=0) done, ",
        f"job 2 (seed=2) failed: exit 1, no luck ({tmp_path}/2/output.log)\n",
        "\n3 jobs, 1 failed, by val/accuracy (max)\n",
        f"  1  1    finished  0.95          seed=1     1.0 s  {tmp_path}/1\n",
        "  the best run again: trainkit --allow-package tests epochs=1 seed=1\n",
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
    monkeypatch.setattr("trainkit.sweeps.results.page.write_sweep_page", lambda *_: 1 / 0)
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
        run(sweep, *(job(tmp_path, place, POLITE) for place in range(2)), job(tmp_path, 2, RUN, 0.9))
    sender.join()
    assert sweep.exit_codes == {"0": 130, "1": 130}
    sweep.finish()
    assert "\n3 jobs, 2 stopped, 1 not run, by val/loss (min)\n" in capfd.readouterr().out


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
    assert "job 0 (seed=0) pruned, " in capfd.readouterr().out


def test_two_sweeps_never_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock"), pytest.raises(ConfigError, match="in use by process"):
        run(sweep_in(tmp_path), job(tmp_path, 0, RUN, 0.9))
    assert not (tmp_path / "0").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_sweep_that_is_killed_leaves_no_job_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.sweeps.support import *;"
        "from trainkit.sweeps.loop.slots import Slots;"
        "place = Path(sys.argv[1]); hang = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)';"
        "run(sweep_in(place, slots=Slots(count=2)), job(place, 0, hang), job(place, 1, hang))"
    )
    logs = [tmp_path / name / "output.log" for name in "01"]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL) as sweep:
        while not all(log.exists() and log.read_text() for log in logs):
            time.sleep(0.01)
        sweep.kill()
    for log in logs:
        assert_ends(int(log.read_text()))


def test_a_folder_of_an_earlier_sweep_is_left_alone(tmp_path: Path) -> None:
    assert free_name(tmp_path / "0") == tmp_path / "0"
    (tmp_path / "0").mkdir()
    (tmp_path / "0-2").mkdir()
    assert free_name(tmp_path / "0", [tmp_path / "0-3"]) == tmp_path / "0-4"
