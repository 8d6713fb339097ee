"""A sample that is lost or read twice after kills at random moments is caught here alone.
A replica that is lost and returns, and changes a bit or is counted wrong in the rows, is caught here alone.
A sharded checkpoint that is not what its ranks wrote, or that a killed rank spoils, is caught here alone.
A run that a closed terminal kills unsaved, or that nohup does not keep alive, is caught here alone.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.contract.running import run, weights
from tests.end_to_end.recording import LOG, samples_by_step
from tests.support import quick
from tests.support.present import present
from tests.support.results import result_of
from tests.support.settings import latest
from tests.support.verdicts import plain
from tests.support.waiting import wait_for
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status
from trainkit.trainer.checkpoint.tensors import load, weights_sha256
from trainkit.trainer.ownership import owner_lives

ROOT = Path(__file__).parents[2]
STEPS = 240
OVERRIDES = (
    "recipe=null", "--allow-package=tests", "data=points", "model.in_features=5", "model.out_features=2",
    "model.dropout=0.2", "model.batch_norm=true", "batch.global_size=8", "batch.micro_size=3", f"steps={STEPS}",
    "checkpoint.every_steps=7", "log_every_steps=1", "callbacks=[start]", "logger=[]", "hydra.run.dir=run",
)  # fmt: skip
FILES = {
    "data/points.yaml": "_target_: tests.end_to_end.recording.Points\n",
    "callbacks/start.yaml": "_target_: tests.end_to_end.recording.Start\n",
}


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        (path := folder / name).parent.mkdir(parents=True)
        path.write_text(text)
    return folder


@pytest.fixture
def conf(cwd: Path) -> Path:
    return written(cwd / "conf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs, and the log of its samples beside it."""
    root = tmp_path_factory.mktemp("whole")
    undisturbed = command(written(root / "conf"), f"hydra.run.dir={root}/run")
    subprocess.run(undisturbed, env=environ(root / "log"), check=True, stdout=subprocess.DEVNULL)
    return root


def arguments(conf: Path, *more: str) -> list[str]:
    return ["--config-dir", str(conf), *latest(*OVERRIDES, *more)]


def command(conf: Path, *more: str) -> list[str]:
    return quick.command(*arguments(conf, *more))


def environ(log: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), LOG: str(log), **more}


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
        ended = process.wait()
        while owner_lives(Path("run/.lock")):  # what was killed stands for the run, which ends a moment later
            time.sleep(0.01)
        if ended == 0:
            return number + 1
    return kills


def test_a_run_killed_at_random_moments_sees_the_same_samples_and_ends_in_the_same_bits(
    conf: Path, whole: Path
) -> None:
    parts = conf.parent / "parts.log"
    starts = killed_runs(conf, parts, kills=3)
    is_over = Path("run/result.json").exists() and result_of("run")["status"] == "finished"
    last = subprocess.run(command(conf, "resume=auto"), env=environ(parts), check=False, capture_output=True, text=True)
    assert (last.returncode, last.stderr) == (0, "")
    assert parts.read_text().count("start") == starts + (0 if is_over else 1)
    assert result_of("run")["weights_sha256"] == result_of(whole / "run")["weights_sha256"]
    samples = samples_by_step(parts, num_samples=37, global_size=8)
    assert samples == samples_by_step(whole / "log", num_samples=37, global_size=8)
    assert sorted(samples) == list(range(STEPS))
    assert [path.name for path in Path().glob("run*")] == ["run"]


def test_a_replica_killed_in_the_middle_of_an_exchange_costs_no_bit_and_leaves_no_memory_behind(conf: Path) -> None:
    log, shared = conf.parent / "reads.log", {*Path("/dev/shm").iterdir()}
    fixed = ["numerics.reproducible=true", "steps=40"]
    alone = command(conf, *fixed, "hydra.run.dir=alone")
    subprocess.run(alone, env=environ(log), check=True, stdout=subprocess.DEVNULL)
    mirrored = command(conf, *fixed, "strategy=mirrored", "strategy.replicas=2", "hydra.run.dir=mirrored")
    planted = {"TRAINKIT_FAIL": "rank=1,step=30,phase=reduce,action=kill,attempt=0"}
    ended = subprocess.run(mirrored, env=environ(log, **planted), check=True, capture_output=True, text=True)
    assert "rank 1 was ended by SIGKILL in step 30 (reduce)" in plain(ended.stderr)
    assert result_of("mirrored")["weights_sha256"] == result_of("alone")["weights_sha256"]
    assert {*Path("/dev/shm").iterdir()} <= shared


def test_replicas_that_drift_apart_stop_the_run_and_the_parameter_is_named(conf: Path) -> None:
    model = ("recipe=digits", "model._target_=tests.end_to_end.wrong.Drifting", "numerics.check_replicas_every=2")
    two = ("strategy=mirrored", "strategy.replicas=2", "supervisor.max_restarts=0", "callbacks=[]", "logger=[]")
    drifting = quick.command("--allow-package=tests", "steps=20", *model, *two)
    ended = subprocess.run(
        drifting, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    # one forward pass a step: the count of a model is put back after the pass that shows which gradients there are
    assert (
        "after step 4 the replicas are no longer equal: the parameter layers.2.bias differs on rank 1 from rank 0."
    ) in ended.stderr


def test_ctrl_c_saves_and_stops_and_the_rest_is_the_same(conf: Path, whole: Path) -> None:
    log = conf.parent / "reads.log"
    itself = [sys.executable, "-m", "trainkit", *arguments(conf)]
    process = subprocess.Popen(itself, env=environ(log), stdout=subprocess.PIPE, text=True)
    wait_for(lambda: log.exists() and log.read_text().count("read") >= 60)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert result_of("run")["status"] == "stopped"
    assert "resume" in out.splitlines()[-1]
    resume = quick.command("resume", "run", "--allow-package=tests")
    subprocess.run(resume, env=environ(log), check=True, stdout=subprocess.DEVNULL)
    assert result_of("run")["weights_sha256"] == result_of(whole / "run")["weights_sha256"]


DIGITS = (
    "recipe=digits", "epochs=40", "numerics.reproducible=true", "batch.global_size=64", "batch.micro_size=16",
    "model.dropout=0.1", "checkpoint.every_steps=50", "log_every_steps=50", "eval.every_epochs=null", "callbacks=[]",
    "logger=[]",
)  # fmt: skip


def elastic(*more: str) -> list[str]:
    return quick.command(*DIGITS, *more)


def broken(index: int, marker: str) -> list[str]:
    """Killed in step 120 of the first attempt, and at every later start while the file exists."""
    starts = [f"index={index},phase=start,attempt={number},while={marker},action=kill" for number in range(1, 9)]
    return [f"index={index},step=120,phase=backward,attempt=0,action=kill", *starts]


def replicas_by_row(folder: str) -> list[int]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [row["replicas"] for row in rows if "replicas" in row]


@pytest.mark.long
def test_two_of_four_are_lost_and_return_and_no_bit_differs(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(elastic("hydra.run.dir=alone"), check=True, stdout=subprocess.DEVNULL)
    (cwd / "gone").touch()
    monkeypatch.setenv("TRAINKIT_FAIL", ";".join([*broken(2, "gone"), *broken(3, "gone")]))
    mirrored = ["strategy=mirrored", "strategy.replicas=4", "elastic.min_replicas=2", "elastic.retry_s=3"]
    lines = []
    with subprocess.Popen(
        elastic(*mirrored, "hydra.run.dir=elastic"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in present(process.stderr):
            lines.append(line)
            if "continues with 2 of 4 replicas" in line:
                (cwd / "gone").unlink()
        out = present(process.stdout).read()
    assert process.returncode == 0
    assert lines[-1].endswith("again: 4 of 4 replicas.\n")
    assert "note: continues with 2 of 4 replicas: they share the shards of each step" in out
    assert out.count("finished after") == 1
    assert "resized" not in out
    counts = replicas_by_row("elastic")
    assert sorted(set(counts)) == [2, 4]
    assert (counts[0], counts[-1]) == (4, 4)
    assert result_of("elastic")["weights_sha256"] == result_of("alone")["weights_sha256"]


POINTS = ("model=net", "model.width=8", "data=points", "batch.global_size=16", "batch.micro_size=4", "optimizer=adamw",
          "optimizer.lr=0.05", "steps=9", "checkpoint.every_steps=2")  # fmt: skip
FSDP = ("strategy=fsdp", "strategy.replicas=4")


@pytest.mark.long
def test_a_sharded_run_keeps_the_hash_best_and_last_of_what_its_ranks_wrote(tmp_path: Path) -> None:
    watched = ("eval.every_steps=3", "eval.batch_size=4")  # 11 samples: a rank of four has no batch of its own
    result = run(tmp_path / "run", *POINTS, *FSDP, *watched, "checkpoint.keep_last=1")
    last = load(Path(result["last"]))
    assert result["status"] == "finished"
    assert result["metrics"] == pytest.approx(run(tmp_path / "one", *POINTS, *watched)["metrics"], rel=1e-12)
    assert result["weights_sha256"] == weights_sha256(last.tensors)
    assert len([name for name in last.checkpoint.files if name.startswith("rank_")]) == 4
    names = json.loads((tmp_path / "run/checkpoints/index.json").read_text())
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == sorted(
        {"index.json", names["last"], names["best"]}
    )


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_saves_costs_that_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole", *POINTS)
    monkeypatch.setenv("TRAINKIT_FAIL", "rank=1,step=4,phase=save,action=kill,attempt=0")
    saved = "checkpoint.background=false"  # or the save before may be under way as well
    result = run(tmp_path / "run", *POINTS, "strategy=fsdp", "strategy.replicas=2", saved)
    assert (result["status"], result["steps"]) == ("finished", 9)
    message = "rank 1 was ended by SIGKILL in step 4 (save)."
    assert message in (text := plain(capfd.readouterr().err))
    assert "Restarting from the checkpoint of step 3" in text  # the first epoch's, being the best
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(result)[name], tensor, rtol=1e-12, atol=1e-14)


RUN = ("epochs=100000", "schedule=constant", "callbacks=[progress]", "logger=[]", "log_every_steps=5")
CHILDREN = ("strategy=mirrored", "strategy.replicas=2", "loader.num_workers=1", "loader.cache=false")
"""Ranks and their loader processes run in the terminal, too."""


def runs(folder: RunFolder, after: int) -> bool:
    status = read_status(folder)
    return status.state == "running" and (status.step or 0) > after


@pytest.mark.long
def test_a_closed_terminal_saves_nohup_goes_on_and_a_kill_is_seen(cwd: Path) -> None:
    folder = RunFolder(cwd / "run")
    command = [sys.executable, "-m", "trainkit", *RUN, *CHILDREN, f"hydra.run.dir={folder.path}"]
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
    log = folder.log.read_text()
    assert "\x1b" not in log
    assert f"hangup after {result['steps']:,} steps" in log

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
    assert before + "\n" == log
    assert "continues at" in after
    assert "\nstep " in after
