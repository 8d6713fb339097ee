"""A worker that comes late and is not given work, or a dead chief that nobody tells of, is caught here alone."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.joining import free_port
from tests.support import quick
from tests.support.waiting import wait_for

ROLES = ("chief:0", "worker:0", "ps:0", "evaluator:0")
RUN = [
    "recipe=null", "strategy=parameter_server", "strategy.mode=async", "steps=100000",
    "schedule=constant", "checkpoint.every_steps=50", "eval.every_epochs=null", "callbacks=[]", "logger=[]",
    "quiet=true", "name=late",
]  # fmt: skip


class Cluster:
    """The processes of a spec, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        ports = dict(zip(ROLES, (free_port() for _ in ROLES), strict=True))
        self.members = {role.partition(":")[0]: [f"127.0.0.1:{port}"] for role, port in ports.items()}

    def start(self, task: str, *more: str) -> None:
        spec = [f"cluster.{role}=[{address}]" for role, (address,) in self.members.items()]
        command = quick.command(*RUN, "cluster=spec", *spec, f"cluster.task={task}", *more)
        self.processes[task] = subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    def end_of(self, task: str) -> tuple[int, str]:
        _, errors = self.processes[task].communicate(timeout=600)
        return self.processes.pop(task).returncode, errors

    def updates_of(self, task: str) -> int:
        """Updates of the newest run that a task computed."""
        lines = [line for path in self.runs("updates.jsonl") for line in path.read_text().splitlines()]
        return sum(json.dumps(task) in line for line in lines)

    def runs(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"outputs/late/*/{name}"))

    def kill(self, task: str) -> None:
        os.kill(self.processes[task].pid, signal.SIGKILL)
        self.end_of(task)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    group = Cluster(tmp_path)
    yield group
    for process in group.processes.values():
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()


@pytest.mark.long
def test_workers_join_late_or_again_and_a_run_continues_after_its_chief_has_died(cluster: Cluster) -> None:
    cluster.start("chief:0")
    cluster.start("ps:0")
    wait_for(lambda: cluster.updates_of("chief") > 20)
    cluster.start("worker:0")
    wait_for(lambda: cluster.updates_of("worker:0") > 0)
    cluster.kill("worker:0")
    steps = cluster.updates_of("chief")
    wait_for(lambda: cluster.updates_of("chief") > steps + 500)  # lines are written by the hundred
    before = cluster.updates_of("worker:0")
    cluster.start("worker:0")
    wait_for(lambda: cluster.updates_of("worker:0") > before)
    cluster.kill("chief:0")
    code, errors = cluster.end_of("worker:0")
    assert (code, "chief:0 (127.0.0.1:" in errors, "resume=auto continues" in errors) == (5, True, True), errors
    assert cluster.end_of("ps:0")[0] != 0
    newest = max(int(path.name[5:]) for path in cluster.runs("checkpoints/step_*"))
    for task in ROLES:
        cluster.start(task, "resume=auto", f"stop_at_step={newest + 300}")
    assert [cluster.end_of(task)[0] for task in ROLES] == [0, 0, 0, 0]
    (result,) = cluster.runs("result.json")
    assert json.loads(result.read_text())["steps"] == newest + 300
    assert json.loads(cluster.runs("evaluations.jsonl")[0].read_text().splitlines()[-1])["step"] == newest + 300


@pytest.mark.long
def test_a_worker_that_was_started_otherwise_is_refused_and_the_others_go_on(cluster: Cluster) -> None:
    short = ("stop_at_step=300", "supervisor.evaluator_timeout_s=1")  # the evaluator never comes
    cluster.start("chief:0", *short)
    cluster.start("ps:0", *short)
    cluster.start("worker:0", *short, "optimizer.lr=0.5")
    code, errors = cluster.end_of("worker:0")
    assert code == 2
    assert "optimizer.lr=0.5: chief:0 (127.0.0.1:" in errors
    assert [cluster.end_of(task)[0] for task in ("chief:0", "ps:0")] == [0, 0]
