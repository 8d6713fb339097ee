"""A printed command that fails when it is pasted, as it lacks a folder or package of the user, is caught here alone."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.launchers.joining import free_port
from tests.support import quick

PACKAGE = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width: int = 4, drop: float = 0.0) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Dropout(drop), nn.ReLU(), nn.Linear(width, 10))
"""
OWN = ("--config-dir", "conf", "--allow-package", "test_pasted_nets")
RUN = ("recipe=null", "model=own", "steps=8", "batch.micro_size=32", "callbacks=[]", "logger=[]")


@pytest.fixture
def own(cwd: Path) -> Path:
    """The current folder, with a package, `model=own` and a choice `strategy=pair` of the user's."""
    (cwd / "test_pasted_nets.py").write_text(PACKAGE)
    for name, text in {
        "model/own": "_target_: test_pasted_nets.Net\nwidth: 4\ndrop: 0.0\n",
        "strategy/pair": "_target_: trainkit.strategies.Mirrored\nreplicas: 2\n",
    }.items():
        (cwd / f"conf/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (cwd / f"conf/{name}.yaml").write_text(text)
    return cwd


def ran(*arguments: str, code: int = 0) -> str:
    """What `trainkit` prints with these arguments."""
    done = subprocess.run(quick.command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pasted(command: str, *more: str) -> str:
    """What a printed command prints."""
    program, *arguments = shlex.split(command)
    assert program == "trainkit"
    return ran(*arguments, *more)


def printed_after(name: str, text: str) -> str:
    """The rest of the one line that begins with a name."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(name)]
    return line.removeprefix(name).strip()


def test_a_stopped_run_resumes_by_its_printed_command_with_choices_of_the_user(own: Path) -> None:
    for strategy in ("one_device", "pair"):
        folder = own / strategy
        text = ran(*OWN, *RUN, f"strategy={strategy}", "stop_at_step=4", f"hydra.run.dir={strategy}")
        command = printed_after("resume ", text)
        assert command == json.loads((folder / "result.json").read_text())["resume"]
        assert command == f"trainkit resume --config-dir conf --allow-package test_pasted_nets {strategy}"
        pasted(command, "strategy=pair")
        assert json.loads((folder / "result.json").read_text())["steps"] == 8


def test_a_task_started_by_hand_prints_its_rank_and_log(own: Path) -> None:
    workers = ",".join(f"'127.0.0.1:{free_port()}'" for _ in range(2))
    spec = ("cluster=spec", f"cluster.worker=[{workers}]", "strategy=multi_worker_mirrored", "hydra.run.dir=run")
    tasks = [quick.command(*OWN, *RUN, *spec, f"cluster.task=worker:{index}") for index in range(2)]
    started = [subprocess.Popen(task, stderr=subprocess.PIPE, text=True) for task in tasks]
    _, text = (process.communicate(timeout=120)[1] for process in started)
    assert [process.returncode for process in started] == [0, 0], text
    assert "launch by cluster=spec: rank 1 of 2 on one host" in text
    assert "worker:1, rank 1 of 2: its output goes to run/logs/rank_1.log\n" in text
    assert (own / "run/logs/rank_1.log").exists()
