"""Shared memory that a killed exchange leaves behind, and replicas that drift apart unseen, are caught here alone."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.verdicts import plain

ROOT = str(Path(__file__).parents[2])
FIXED = ["recipe=null", "data=digits", "model.in_features=64", "batch.global_size=64", "steps=20", "logger=[]",
         "callbacks=[]", "strategy=mirrored", "strategy.replicas=2", "hydra.run.dir=run"]  # fmt: skip


def trainkit(*more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        quick.command(*more), env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "reduce", ["shared_memory", *(pytest.param(one, marks=pytest.mark.long) for one in ("backend", "ring"))]
)
def test_a_rank_killed_in_an_exchange_is_named_and_leaves_no_memory_behind(reduce: str, cwd: Path) -> None:
    shared = sorted(Path("/dev/shm").iterdir())
    planted = "rank=1,step=5,phase=reduce,action=kill"
    ended = trainkit(*FIXED, f"strategy.reduce={reduce}", "supervisor.max_restarts=0", TRAINKIT_FAIL=planted)
    assert ended.returncode == 1
    assert "rank 1 was ended by SIGKILL in step 5 (reduce)" in plain(ended.stderr)
    assert sorted(Path("/dev/shm").iterdir()) == shared


def test_replicas_that_drift_apart_stop_the_run_and_the_parameter_is_named(cwd: Path) -> None:
    model = ("model._target_=tests.end_to_end.wrong.Drifting", "--allow-package", "tests")
    ended = trainkit(*FIXED, *model, "numerics.check_replicas_every=2", "supervisor.max_restarts=0", PYTHONPATH=ROOT)
    assert ended.returncode == 1
    # one forward pass a step: the count of a model is put back after the pass that shows which gradients there are
    assert (
        "after step 4 the replicas are no longer equal: the parameter layers.2.bias differs on rank 1 from rank 0."
    ) in ended.stderr
