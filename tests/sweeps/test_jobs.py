from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainkit.errors import StoppedError, TerminatedError
from trainkit.sweeps.jobs import Job, Sweep, free_folder

RUN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(); value = float(sys.argv[2])
(folder / "resolved.yaml").write_text("eval: {metric: val/accuracy}")
result = {"status": "finished", "metrics": {"val/accuracy": value}, "seconds": 1}
(folder / "result.json").write_text(json.dumps(result))
"""
HANG = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).mkdir(); time.sleep(60)"
POLITE = """
import pathlib, signal, sys, time
def stop(*_): sys.exit(130)
signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
pathlib.Path(sys.argv[1]).mkdir(); time.sleep(60)
"""


def job(folder, number, code, *words):
    place = folder / str(number)
    command = (sys.executable, "-c", code, str(place), *map(str, words))
    return Job(name=str(number), folder=place, overrides=("epochs=1", f"seed={number}"), command=command)


def waiting_for(path: Path):
    while not path.exists():
        time.sleep(0.01)


def signalled(when: Path, *numbers):
    """Send signals to this process once a job runs."""

    def send():
        waiting_for(when)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_jobs_run_in_their_order_and_are_ranked(tmp_path, capfd):
    sweep = Sweep(folder=tmp_path)
    assert sweep.run([job(tmp_path, 0, RUN, 0.9), job(tmp_path, 1, RUN, 0.95)]) == [0, 0]
    sweep.finish()
    assert capfd.readouterr().out == (
        "\njob 1 of 2: seed=0\n"
        "\njob 2 of 2: seed=1\n"
        "\n2 jobs, by val/accuracy (max)\n"
        "  #  job  status    val/accuracy  overrides  time   folder\n"
        f"  1  1    finished  0.95          seed=1     1.0 s  {tmp_path}/1\n"
        f"  2  0    finished  0.9           seed=0     1.0 s  {tmp_path}/0\n"
        f"  leaderboard  {tmp_path}/leaderboard.md\n"
    )


def test_a_failed_job_lets_the_others_run(tmp_path, capfd):
    sweep = Sweep(folder=tmp_path)
    codes = sweep.run([job(tmp_path, 0, "raise SystemExit(2)"), job(tmp_path, 1, RUN, 0.95)])
    sweep.finish()
    assert codes == [2, 0]
    assert "2 jobs, 1 failed, by val/accuracy (max)" in capfd.readouterr().out
    assert (tmp_path / "leaderboard.csv").read_text().splitlines()[2] == "2,0,exit 2,,0,,0"


def test_the_leaderboard_is_right_after_every_job(tmp_path):
    sweep = Sweep(folder=tmp_path)
    reads = "import pathlib, sys; print(pathlib.Path(sys.argv[2]).read_text(), file=open(sys.argv[2] + '.seen', 'w'))"
    sweep.run([job(tmp_path, 0, RUN, 0.9), job(tmp_path, 1, reads, tmp_path / "sweep.json")])
    seen = json.loads((tmp_path / "sweep.json.seen").read_text())["jobs"]
    assert [(item["job"], item["exit_code"]) for item in seen] == [("0", 0), ("1", None)]


def test_batches_of_a_search_share_one_leaderboard(tmp_path):
    sweep = Sweep(folder=tmp_path)
    sweep.run([job(tmp_path, 0, RUN, 0.9)])
    sweep.run([job(tmp_path, 1, RUN, 0.95)])
    assert [line.split(",")[1:5] for line in (tmp_path / "leaderboard.csv").read_text().splitlines()[1:]] == [
        ["1", "finished", "0.95", "1"],
        ["0", "finished", "0.9", "0"],
    ]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, StoppedError), (signal.SIGTERM, TerminatedError)])
def test_a_signal_stops_the_job_in_good_order_and_ends_the_sweep(tmp_path, capfd, number, error):
    sweep = Sweep(folder=tmp_path)
    sender = signalled(tmp_path / "0", number)
    with pytest.raises(error) as caught:
        sweep.run([job(tmp_path, 0, POLITE), job(tmp_path, 1, RUN, 0.9)])
    sender.join()
    assert str(caught.value) == "the sweep was stopped: 1 of 2 jobs were started."
    assert sweep.exit_codes == {"0": 130}
    sweep.finish()
    assert "\n2 jobs, 1 stopped, 1 not run, by val/loss (min)\n" in capfd.readouterr().out
    assert [item["exit_code"] for item in json.loads((tmp_path / "sweep.json").read_text())["jobs"]] == [130, None]


def test_a_job_that_will_not_stop_is_ended(tmp_path):
    sweep = Sweep(folder=tmp_path)
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANG
    sender = signalled(tmp_path / "0", signal.SIGINT, signal.SIGINT, signal.SIGINT)
    with pytest.raises(StoppedError):
        sweep.run([job(tmp_path, 0, deaf)])
    sender.join()
    assert sweep.exit_codes == {"0": -signal.SIGKILL}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_sweep_that_is_killed_leaves_no_job_behind(tmp_path):
    pid_file = tmp_path / "pid"
    hang = (
        f"import os, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); import time; time.sleep(60)"
    )
    code = (
        "import sys; from pathlib import Path; from trainkit.sweeps.jobs import Job, Sweep; "
        "Sweep(folder=Path(sys.argv[1])).run([Job(name='0', folder=Path(sys.argv[1]) / '0', overrides=(), "
        "command=(sys.executable, '-c', sys.argv[2]))])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s"), hang], stdout=subprocess.DEVNULL) as sweep:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        sweep.kill()
    gone = time.monotonic() + 2
    status = Path(f"/proc/{pid_file.read_text()}/stat")
    while time.monotonic() < gone and status.exists() and " Z " not in status.read_text():
        time.sleep(0.01)
    assert not status.exists() or " Z " in status.read_text()


def test_a_folder_of_an_earlier_sweep_is_left_alone(tmp_path):
    assert free_folder(tmp_path / "0") == tmp_path / "0"
    (tmp_path / "0").mkdir()
    (tmp_path / "0-2").mkdir()
    assert free_folder(tmp_path / "0") == tmp_path / "0-3"
