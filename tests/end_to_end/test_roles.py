"""A role of a parameter-server run whose death ends the others, or leaves one behind, is caught here alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="finds tasks in /proc")]

RUN = [
    "recipe=null", "strategy=parameter_server", "strategy.servers=2", "strategy.evaluator=true",
    "epochs=60", "checkpoint.every_steps=50", "eval.every_epochs=null", "quiet=true", "callbacks=[]", "logger=[]",
]  # fmt: skip
WHOLE, IN_PARTS = ("strategy.workers=3",), ("strategy.workers=1", "strategy.shard=2")
ALONE = "the others continue."
TOGETHER = "Restarting from the checkpoint of step "
UNDISTURBED = 0.9639
"""The accuracy of this run where nothing happens, in either mode."""
NOISE = 0.01
"""One standard deviation of the accuracy of 360 samples."""
ROLES = ("chief", "worker", "ps", "evaluator")
MOMENTS = random.Random(5)


def tasks(folder: Path) -> dict[str, int]:
    """Process ids of the tasks that run in a folder, by task."""
    pids = {}
    for process in Path("/proc").glob("[0-9]*"):  # forks of the quick process show its command line: the folder counts
        try:
            name, is_in_folder = (process / "comm").read_text().strip(), (process / "cwd").readlink() == folder.parent
        except OSError:
            continue
        if is_in_folder and name.partition(":")[0] in ROLES:
            pids[name] = int(process.name)
    return pids


@pytest.mark.parametrize(
    ("task", "mode", "workers", "outcome"),
    [
        ("worker:0", "async", WHOLE, ALONE),
        ("worker:1", "sync", WHOLE, ALONE),
        ("evaluator:0", "sync", WHOLE, ALONE),
        ("ps:1", "async", WHOLE, TOGETHER),
        ("chief:0", "sync", WHOLE, TOGETHER),
        ("worker:1", "sync", IN_PARTS, TOGETHER),
    ],
)
def test_a_task_killed_at_a_random_moment_causes_the_documented_restart(
    tmp_path: Path, task: str, mode: str, workers: tuple[str, ...], outcome: str
) -> None:
    folder = tmp_path / "run"
    command = quick.command(*RUN, *workers, f"strategy.mode={mode}", f"hydra.run.dir={folder}")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(folder.glob("checkpoints/step_*")), process)
    time.sleep(MOMENTS.uniform(0, 2))
    os.kill(tasks(folder)[task], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "was ended by SIGKILL" in errors.splitlines()[0]
    assert outcome in errors.splitlines()[0]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 1380)
    assert result["metrics"]["val/accuracy"] == pytest.approx(UNDISTURBED, abs=NOISE)
    assert json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["step"] == 1380
    assert tasks(folder) == {}
