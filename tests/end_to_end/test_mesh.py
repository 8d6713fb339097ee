"""A rank of a mesh that dies or stops, and takes the run along, costs a bit, or is not named, is caught here alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_roles import tasks
from tests.support import quick
from tests.support.results import result_of
from tests.support.verdicts import plain
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="finds tasks in /proc"),
]

RUN = (
    "recipe=digits", "batch.micro_size=16", "epochs=null", "steps=200", "checkpoint.every_steps=25",
    "eval.every_epochs=null", "callbacks=[]", "logger=[]", "supervisor.hang_timeout_s=20", "log_every_steps=50",
)  # fmt: skip
AXES = {
    "replicate": ("strategy.replicate=2", "strategy.shard=1"),
    "shard": ("strategy.shard=2",),
    "tensor": ("strategy.shard=1", "strategy.tensor=2"),
}


def command(folder: str, *more: str) -> list[str]:
    return quick.command(*RUN, "strategy=mesh", *more, f"hydra.run.dir={folder}")


KILLED, STOPPED = "rank 1 was ended by SIGKILL in step", "rank 1 has made no progress for 20 s in step"


@pytest.mark.parametrize(
    ("axis", "sent", "line"),
    [
        ("replicate", signal.SIGSTOP, STOPPED),
        ("shard", signal.SIGKILL, KILLED),
        ("tensor", signal.SIGKILL, KILLED),
        pytest.param("replicate", signal.SIGKILL, KILLED, marks=pytest.mark.matrix),
        *(pytest.param(axis, signal.SIGSTOP, STOPPED, marks=pytest.mark.matrix) for axis in ("shard", "tensor")),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_and_costs_no_bit(axis: str, sent: int, line: str, cwd: Path) -> None:
    subprocess.run(command("whole", *AXES[axis]), check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(
        command("after", *AXES[axis]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(Path("after").glob("checkpoints/step_*")), process)
    os.kill(tasks(cwd / "after")["worker:1"], sent)
    errors = plain(process.communicate(timeout=300)[1])
    assert process.returncode == 0, errors
    assert line in errors
    assert "Restarting from the checkpoint of step" in errors
    assert result_of("after")["weights_sha256"] == result_of("whole")["weights_sha256"]
    assert tasks(cwd / "after") == {}


@pytest.mark.parametrize(
    ("axis", "tensor"),
    [
        ("replicate", 1),
        ("shard", 2),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("shard", 1), ("replicate", 2))),
    ],
)
def test_a_run_continues_on_the_ranks_that_are_left_of_auto(
    axis: str, tensor: int, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, devices = "replicate" if axis == "shard" else "shard", ",".join(["cpu"] * 2 * tensor)
    plan = ["strategy.tensor=2", "strategy.plan={layers.0:colwise,layers.2:rowwise}"] if tensor > 1 else []
    keys = (f"strategy.{other}=1", f"strategy.{axis}=auto", f"strategy.devices=[{devices}]", *plan)
    subprocess.run(command("whole", *keys, "precision=fp64"), check=True, stdout=subprocess.DEVNULL)
    (cwd / "gone").touch()
    starts = [f"index=1,phase=start,attempt={number},while=gone,action=kill" for number in range(1, 9)]
    monkeypatch.setenv("TRAINKIT_FAIL", ";".join(["index=1,step=60,phase=backward,attempt=0,action=kill", *starts]))
    elastic = ("elastic.min_replicas=1", "elastic.retry_s=600", "precision=fp64")
    done = subprocess.run(command("fewer", *keys, *elastic), check=True, capture_output=True, text=True)
    assert "worker:1 (cpu) is lost: the run continues with 1 of 2 replicas" in done.stderr
    assert (result_of("fewer")["status"], result_of("fewer")["steps"]) == ("finished", 200)
    assert result_of("fewer")["metrics"] == pytest.approx(result_of("whole")["metrics"], rel=1e-9)
