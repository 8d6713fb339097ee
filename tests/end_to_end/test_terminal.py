"""A run that a closed terminal kills unsaved, or that nohup does not keep alive, is caught here alone."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.faking import wait_for
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status

RUN = ("epochs=100000", "schedule=constant", "callbacks=[progress]", "logger=[]", "log_every_steps=5")


def runs(folder: RunFolder, after: int) -> bool:
    found = read_status(folder)
    return found.state == "running" and (found.step or 0) > after


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [("loader.num_workers=1", "loader.cache=false"), ("strategy=mirrored", "strategy.replicas=2")],
    ids=["loading", "mirrored"],
)
def test_a_closed_terminal_saves_nohup_goes_on_and_a_kill_is_seen(cwd: Path, strategy: tuple[str, ...]) -> None:
    folder = RunFolder(cwd / "run")
    command = [sys.executable, "-m", "trainkit", *RUN, *strategy, f"hydra.run.dir={folder.path}"]
    pid, leader = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, command)
    wait_for(lambda: runs(folder, 5), timeout_s=120)
    os.close(leader)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    result = json.loads(folder.result.read_text())
    assert (result["status"], result["reason"]) == ("hangup", "the terminal was closed (SIGHUP)")
    assert Path(result["last"]).name == f"step_{result['steps']:08d}"
    assert (read_status(folder).state, read_status(folder).step) == ("hangup", result["steps"])
    told = folder.log.read_text()
    assert "\x1b" not in told
    assert f"hangup after {result['steps']:,} steps" in told

    with (cwd / "nohup.out").open("w") as output:
        process = subprocess.Popen(
            ["nohup", sys.executable, "-m", "trainkit", "resume", str(folder.path)], stdout=output, stderr=output
        )
        wait_for(lambda: runs(folder, result["steps"]), timeout_s=120)
        process.send_signal(signal.SIGHUP)
        step = read_status(folder).step or 0
        wait_for(lambda: runs(folder, step), timeout_s=60)
        process.kill()
        process.wait()
    assert read_status(folder).state == "killed"
    assert (read_status(folder).resumable, folder.read_result()) == (True, None)
    before, after = folder.log.read_text().split("\n----- ")
    assert before + "\n" == told
    assert "continues at" in after
    assert "\nstep " in after
