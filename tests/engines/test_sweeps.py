"""A job that outlives its sweep, or trains a step twice after SLURM preempts it, is caught here alone."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.test_engines import needs
from tests.launchers.one_node_slurm import program, slurm
from tests.support import quick
from tests.support.present import present
from tests.support.results import result_of
from tests.support.settings import latest
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

JOB = ("recipe=digits", "epochs=1", "callbacks=[]", "logger=[]", "quiet=true", "eval.metric=val/accuracy")
PACKAGES = {"submitit_local": ("submitit",), "ray": ("ray",), "spark": ("pyspark", "java")}


def trainkit(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = quick.command(*arguments)
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


def below(cwd: Path) -> list[str]:
    """Processes that work in a folder, this one apart."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == cwd and process.name != str(os.getpid()):
                commands.append((process / "cmdline").read_text().replace("\0", " "))
    return commands


@pytest.mark.parametrize("launcher", PACKAGES)
def test_jobs_of_one_process_and_of_several_end_in_a_folder_each(launcher: str, cwd: Path) -> None:
    needs(*PACKAGES[launcher])
    grid = ("strategy=one_device,mirrored", "strategy.replicas=2", "hydra.sweep.dir=sweep")
    done = trainkit("-m", *JOB, *grid, f"hydra/launcher={launcher}", "hydra.launcher.jobs_at_once=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in Path("sweep").iterdir() if path.name.isdecimal()) == list("01")
    assert {result_of(f"sweep/{number}")["status"] for number in range(2)} == {"finished"}
    wait_for(lambda: not below(cwd))


@pytest.mark.parametrize("launcher", ["submitit_local", "spark"])
def test_jobs_end_with_a_sweep_that_is_killed(launcher: str, cwd: Path) -> None:
    needs(*PACKAGES[launcher])
    command = latest("-m", *JOB, "epochs=100000", "hydra.sweep.dir=sweep", f"hydra/launcher={launcher}")
    sweep = subprocess.Popen([sys.executable, "-m", "trainkit", *command], stdout=subprocess.DEVNULL)
    wait_for(Path("sweep/0/metrics.jsonl").exists, sweep)
    sweep.kill()
    sweep.wait()
    wait_for(lambda: not below(cwd))


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    needs("submitit")
    with slurm() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield


def test_a_run_on_slurm_is_a_job_of_an_array(cwd: Path, one_node: None) -> None:
    done = trainkit(*JOB, "cluster=slurm", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of("sweep/0")["status"] == "finished"
    assert [path.name for path in Path("sweep/.jobs/submitit").glob("*_0_result.pkl")]


def test_a_job_that_is_preempted_saves_and_goes_on(cwd: Path, one_node: None) -> None:
    options = ("cluster=slurm", "hydra.sweep.dir=sweep", "epochs=40", "checkpoint.background=false")
    environ = {"TRAINKIT_FAIL": f"phase=data,while={cwd / 'slow'},action=slow"}
    Path("slow").touch()  # until it has been preempted
    command = quick.command(*latest(*JOB, *options))
    sweep = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
    wait_for(Path("sweep/0/metrics.jsonl").exists, sweep)
    (submitted,) = Path("sweep/.jobs/submitit").glob("*_submitted.pkl")
    job = submitted.name.removesuffix("_submitted.pkl")
    subprocess.run([present(program("scancel")), "--signal=USR2", job], check=True)
    wait_for(Path("sweep/0/result.json").exists)
    assert result_of("sweep/0")["status"] == "preempted"
    Path("slow").unlink()
    start_now = [present(program("scontrol")), "update", f"JobId={job}", "StartTime=now"]
    while sweep.poll() is None:  # what is queued again waits for two minutes, unless it is told not to
        subprocess.run(start_now, capture_output=True, check=False)
        time.sleep(1)
    out, _ = sweep.communicate()
    assert sweep.returncode == 0, out
    result = result_of("sweep/0")
    assert (result["status"], result["steps"]) == ("finished", 920)
    rows = [json.loads(line) for line in Path("sweep/0/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps))  # no step was trained twice
