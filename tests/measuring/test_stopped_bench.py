"""A measurement that is stopped: a process or a folder that it leaves behind is caught here alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.errors import TerminatedError
from trainkit.measuring.bench import scratch_folder

LONG = (
    "recipe=null", "strategy=mirrored", "strategy.replicas=2", "steps=100000", "optimizer.lr=0.1,0.2",
    "loader.cache=false", "loader.num_workers=1", "--steps", "99000",
)  # fmt: skip
PATIENCE_S = 300
"""Seconds to wait on a machine that is busy with other work."""


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def processes_with(variable: str) -> list[int]:
    """Return the processes that have a variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().decode(errors="replace").split("\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_a_stopped_bench_leaves_no_process_and_no_folder(cwd: Path, number: int, code: int) -> None:
    scratch = cwd / "scratch"
    scratch.mkdir()
    variable = f"TMPDIR={scratch}"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainkit", "bench", *LONG],
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or [*scratch.glob("trainkit-bench-*/*/run/live/rank_1*")])
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code
        kept = (path.name for path in scratch.iterdir())
        assert [name for name in kept if not name.startswith("torchinductor_")] == []  # the compiler's own cache
        wait_for(lambda: not processes_with(variable))
        assert [*(cwd / "outputs/bench").iterdir()] == []
    finally:
        for pid in processes_with(variable):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_signal_that_interrupts_the_removal_does_not_prevent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, calls = shutil.rmtree, list[Path]()

    def interrupted(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(TerminatedError), scratch_folder() as folder:
        pass
    assert not folder.exists()
    assert len(calls) == 2
