"""A sample that is lost or read twice after kills at random moments is caught here alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.recording import LOG, samples_by_step
from tests.support import quick
from tests.support.settings import latest
from tests.support.verdicts import plain

ROOT = Path(__file__).parents[2]
STEPS = 240
OVERRIDES = [
    "recipe=null",
    "--allow-package=tests",
    "data=points",
    "model.in_features=5",
    "model.out_features=2",
    "model.dropout=0.2",
    "model.batch_norm=true",
    "batch.global_size=8",
    "batch.micro_size=3",
    f"steps={STEPS}",
    "checkpoint.every_steps=7",
    "log_every_steps=1",
    "callbacks=[start]",
    "logger=[]",
    "hydra.run.dir=run",
]
FILES = {
    "data/points.yaml": "_target_: tests.end_to_end.recording.Points\n",
    "callbacks/start.yaml": "_target_: tests.end_to_end.recording.Start\n",
}


@pytest.fixture
def conf(cwd: Path) -> Path:
    for name, text in FILES.items():
        path = cwd / "conf" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return cwd / "conf"


def arguments(conf: Path, *more: str) -> list[str]:
    return ["--config-dir", str(conf), *latest(*OVERRIDES, *more)]


def command(conf: Path, *more: str) -> list[str]:
    return quick.command(*arguments(conf, *more))


def environ(log: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), LOG: str(log), **more}


def finished(folder: Path) -> dict[str, object]:
    result: dict[str, object] = json.loads((folder / "result.json").read_text())
    return result


def killed_runs(conf: Path, log: Path, kills: int) -> int:
    """Start the run again and again, killed at random moments of its training, the first one in a save.

    On a busy machine one may come to the end before it is killed: it is the last one. Returns how many have begun.
    """
    moments = random.Random(0)
    for number in range(kills):
        planted = {"TRAINKIT_FAIL": "step=7,phase=save,action=kill"} if number == 0 else {}
        started = log.read_text().count("start") if log.exists() else 0
        process = subprocess.Popen(
            command(conf, "resume=auto"),
            env=environ(log, **planted),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and (not log.exists() or log.read_text().count("start") == started):
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.25))
        process.kill()
        if process.wait() == 0:
            return number + 1
    return kills


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_killed_at_random_moments_sees_the_same_samples_and_ends_in_the_same_bits(conf: Path, kills: int) -> None:
    whole, parts = conf.parent / "whole.log", conf.parent / "parts.log"
    subprocess.run(command(conf, "hydra.run.dir=whole"), env=environ(whole), check=True, stdout=subprocess.DEVNULL)
    begun = killed_runs(conf, parts, kills)
    is_over = Path("run/result.json").exists() and finished(Path("run"))["status"] == "finished"
    last = subprocess.run(command(conf, "resume=auto"), env=environ(parts), check=True, capture_output=True, text=True)
    assert last.stderr == ""
    assert parts.read_text().count("start") == begun + (0 if is_over else 1)
    assert finished(Path("run"))["weights_sha256"] == finished(Path("whole"))["weights_sha256"]
    seen = samples_by_step(parts, num_samples=37, global_size=8)
    assert seen == samples_by_step(whole, num_samples=37, global_size=8)
    assert sorted(seen) == list(range(STEPS))
    assert [path.name for path in Path().glob("run*")] == ["run"]


def test_a_replica_killed_in_the_middle_of_an_exchange_costs_no_bit(conf: Path) -> None:
    log = conf.parent / "reads.log"
    fixed = ["numerics.reproducible=true", "steps=40"]
    alone = command(conf, *fixed, "hydra.run.dir=alone")
    subprocess.run(alone, env=environ(log), check=True, stdout=subprocess.DEVNULL)
    mirrored = command(conf, *fixed, "strategy=mirrored", "strategy.replicas=2", "hydra.run.dir=mirrored")
    planted = {"TRAINKIT_FAIL": "rank=1,step=30,phase=reduce,action=kill,attempt=0"}
    ended = subprocess.run(mirrored, env=environ(log, **planted), check=True, capture_output=True, text=True)
    assert "rank 1 was ended by SIGKILL in step 30 (reduce)" in plain(ended.stderr)
    assert finished(Path("mirrored"))["weights_sha256"] == finished(Path("alone"))["weights_sha256"]


def test_ctrl_c_saves_and_stops_and_the_rest_is_the_same(conf: Path) -> None:
    log = conf.parent / "reads.log"
    subprocess.run(command(conf, "hydra.run.dir=whole"), env=environ(log), check=True, stdout=subprocess.DEVNULL)
    log.unlink()
    itself = [sys.executable, "-m", "trainkit", *arguments(conf)]
    process = subprocess.Popen(itself, env=environ(log), stdout=subprocess.PIPE, text=True)
    while not log.exists() or log.read_text().count("read") < 60:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert finished(Path("run"))["status"] == "stopped"
    assert "resume" in out.splitlines()[-1]
    resume = quick.command("resume", "run", "--allow-package=tests")
    subprocess.run(resume, env=environ(log), check=True, stdout=subprocess.DEVNULL)
    assert finished(Path("run"))["weights_sha256"] == finished(Path("whole"))["weights_sha256"]
