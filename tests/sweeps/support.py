"""Jobs of a few milliseconds, which do to a sweep what trainings do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support import quick
from tests.support.waiting import wait_for
from trainkit.sweeps.job_sources import JobList, SweepJob
from trainkit.sweeps.loop import Sweep
from trainkit.sweeps.screen import Screen

RUN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]); value = float(sys.argv[2])
(folder / "resolved.yaml").write_text("eval: {metric: val/accuracy}")
result = {"status": "finished", "metrics": {"val/accuracy": value}, "seconds": 1}
(folder / "result.json").write_text(json.dumps(result))
with open(folder / "runs", "a") as file: print(*sys.argv[3:], file=file)
"""
"""A job that finishes; argument: its accuracy."""

POLITE = """
import pathlib, signal, sys, time
def stop(*_): sys.exit(130)
signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGHUP, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
(pathlib.Path(sys.argv[1]) / "here").touch(); time.sleep(60)
"""
"""A job that runs until it is asked to stop."""

DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + POLITE.replace(
    "signal.signal(signal.SIGINT, stop)", "pass"
)
"""A job that does not stop when it is asked to."""

FRAIL = """
import os, pathlib, signal, sys
tries = pathlib.Path(sys.argv[1]) / "tries"
count = int(tries.read_text()) if tries.exists() else 0
tries.write_text(str(count + 1))
(pathlib.Path(sys.argv[1]) / "resolved.yaml").touch()
if count < int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)
"""
"""A job that is killed so many times before it finishes."""


def job(
    folder: Path, number: int, code: str, *arguments: object, slots: int = 1, config: str = "", steps: int | None = None
) -> SweepJob:
    job_folder = folder / str(number)
    command = (sys.executable, "-c", code, str(job_folder), *map(str, arguments))
    return SweepJob(
        name=str(number),
        folder=job_folder,
        overrides=("epochs=1", f"steps={number if steps is None else steps}"),
        command=command,
        slots=slots,
        config=config,
        label=f"steps={number}",
    )


def sweep_in(folder: Path, **settings: Any) -> Sweep:
    return Sweep(folder=folder, screen=Screen, **settings)


def run(sweep: Sweep, *jobs: SweepJob) -> dict[str, int]:
    sweep.expect(jobs)
    sweep.run(JobList(jobs))
    return sweep.exit_codes


def signalled(when: Path, *numbers: int) -> threading.Thread:
    """Send signals to this process once a job runs."""

    def send() -> None:
        wait_for(when.exists)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def assert_ends(pid: int) -> None:
    """Wait for a process that is not ours to end, for minutes at most."""
    status = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not status.exists() or " Z " in status.read_text())


def trained(cwd: Path, *arguments: str) -> None:
    """Run a command line that trains."""
    common = ["recipe=null", "callbacks=[]", "logger=[]", "eval.metric=val/accuracy"]
    done = subprocess.run(quick.command(*arguments, *common), capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
