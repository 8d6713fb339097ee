from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps.support import DEAF, FRAIL, POLITE, RUN, job, run, signalled, sweep_in
from trainkit.errors import ConfigError, HangupError, StoppedError, TerminatedError
from trainkit.sweeps.job_sources import JobList, SweepJob
from trainkit.sweeps.loop.slots import Slots
from trainkit.trainer.ownership import free_name, locked

COUNT = "import sys; open(sys.argv[1] + '/runs', 'a').write('x'); "


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\d+\.\d s", "N s", capfd.readouterr().out)


def test_jobs_run_and_are_ranked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_in(tmp_path)
    assert run(sweep, job(tmp_path, 0, RUN, 0.9), job(tmp_path, 1, RUN, 0.95)) == {"0": 0, "1": 0}
    sweep.finish()
    assert said(capfd) == (
        "job 0 (seed=0) starts\n"
        "job 0 (seed=0) done, N s\n"
        "job 1 (seed=1) starts\n"
        "job 1 (seed=1) done, N s\n"
        "\n2 jobs, by val/accuracy (max)\n"
        "  #  job  status    val/accuracy  overrides  time   folder\n"
        f"  1  1    finished  0.95          seed=1     N s  {tmp_path}/1\n"
        f"  2  0    finished  0.9           seed=0     N s  {tmp_path}/0\n"
        "  the best run again: trainkit --allow-package tests epochs=1 seed=1\n"
        f"  the best on all devices: trainkit top --allow-package tests {tmp_path} --k 1 --then strategy=mirrored\n"
        f"  page  {tmp_path}/report.html\n"
        f"  leaderboard  {tmp_path}/leaderboard.md\n"
    )


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
    out = said(capfd)
    assert [out.count(f"equals job {name}, which runs only once") for name in ("0", "1")] == [1, 1]
    assert sweep.exit_codes == {"0": 0, "1": 2}
    assert (tmp_path / "1/runs").read_text() == "x"


def test_a_page_that_cannot_be_written_ends_no_sweep_and_report_page_leaves_it_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = sweep_in(tmp_path)
    run(sweep, job(tmp_path, 0, RUN, 0.9))
    monkeypatch.setattr("trainkit.sweeps.results.page.write_sweep_page", lambda *_: 1 / 0)
    sweep.finish()
    assert "report.html cannot be written: ZeroDivisionError" in caplog.text
    assert "  leaderboard  " in said(capfd)
    caplog.clear()
    resolved = tmp_path / "0/resolved.yaml"
    resolved.write_text(resolved.read_text() + "report_page: false\n")
    sweep.finish()
    assert caplog.text == ""
    assert "  page  " not in said(capfd)


def test_a_failed_job_lets_the_others_run_and_says_where_to_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_in(tmp_path)
    codes = run(sweep, job(tmp_path, 0, "raise SystemExit('no luck')"), job(tmp_path, 1, RUN, 0.95))
    sweep.finish()
    out = said(capfd)
    assert codes == {"0": 1, "1": 0}
    assert f"job 0 (seed=0) failed: exit 1, no luck ({tmp_path}/0/output.log)\n" in out
    assert "2 jobs, 1 failed, by val/accuracy (max)" in out
    assert (tmp_path / "leaderboard.csv").read_text().splitlines()[2].startswith("2,0,exit 1,")


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


@pytest.mark.parametrize(("retries", "code"), [(1, -9), (2, 0)])
def test_a_job_that_dies_is_tried_again_as_often_as_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], retries: int, code: int
) -> None:
    sweep = sweep_in(tmp_path, retries=retries)
    assert run(sweep, job(tmp_path, 0, FRAIL, 2)) == {"0": code}
    assert rows(tmp_path)["0"]["tries"] == retries + 1 == int((tmp_path / "0/tries").read_text())
    assert capfd.readouterr().out.count("job 0 (seed=0): signal 9; it is tried again\n") == retries


def test_a_job_that_is_tried_again_resumes(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path, retries=1)
    run(sweep, job(tmp_path, 0, FRAIL + "else: print(sys.argv[3:])", 1))
    assert (tmp_path / "0/output.log").read_text() == "['resume=auto']\n"


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_is_not_tried_again(tmp_path: Path, code: int) -> None:
    sweep = sweep_in(tmp_path, retries=3)
    run(sweep, job(tmp_path, 0, f"raise SystemExit({code})"))
    assert (rows(tmp_path)["0"]["exit_code"], rows(tmp_path)["0"]["tries"]) == (code, 1)


def test_the_leaderboard_is_right_after_every_job(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    reads = "import pathlib, sys; print(pathlib.Path(sys.argv[2]).read_text(), file=open(sys.argv[2] + '.seen', 'w'))"
    run(sweep, job(tmp_path, 0, RUN, 0.9), job(tmp_path, 1, reads, tmp_path / "sweep.json"))
    seen = json.loads((tmp_path / "sweep.json.seen").read_text())["jobs"]
    assert [(item["job"], item["exit_code"]) for item in seen] == [("0", 0), ("1", None)]


def test_batches_of_a_search_share_one_leaderboard(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    run(sweep, job(tmp_path, 0, RUN, 0.9))
    run(sweep, job(tmp_path, 1, RUN, 0.95))
    assert [line.split(",")[1:5] for line in (tmp_path / "leaderboard.csv").read_text().splitlines()[1:]] == [
        ["1", "finished", "0.95", "1"],
        ["0", "finished", "0.9", "0"],
    ]


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
    with pytest.raises(error) as caught:
        run(sweep, *(job(tmp_path, place, POLITE) for place in range(2)), job(tmp_path, 2, RUN, 0.9))
    sender.join()
    assert str(caught.value) == (
        f"the sweep was stopped: 2 of 3 jobs were started. The same command resumes it with sweep.resume={tmp_path}"
    )
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
        "place = Path(sys.argv[1]); hang = 'import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)';"
        "run(sweep_in(place, slots=Slots(count=2)), job(place, 0, hang), job(place, 1, hang))"
    )
    logs = [tmp_path / name / "output.log" for name in "01"]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL) as sweep:
        while not all(log.exists() and log.read_text() for log in logs):
            time.sleep(0.01)
        sweep.kill()
    gone = time.monotonic() + 60
    states = [Path(f"/proc/{log.read_text().strip()}/stat") for log in logs]

    def alive() -> list[Path]:
        return [path for path in states if path.exists() and " Z " not in path.read_text()]

    while time.monotonic() < gone and alive():
        time.sleep(0.01)
    assert not alive()


def test_a_folder_of_an_earlier_sweep_is_left_alone(tmp_path: Path) -> None:
    assert free_name(tmp_path / "0") == tmp_path / "0"
    (tmp_path / "0").mkdir()
    (tmp_path / "0-2").mkdir()
    assert free_name(tmp_path / "0", [tmp_path / "0-3"]) == tmp_path / "0-4"
