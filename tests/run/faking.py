"""Supervising fake workers from a test."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.support.waiting import wait_for
from trainkit.cluster.tasks import Task
from trainkit.run.agent.agent import AgentSettings
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.supervisor import supervise
from trainkit.run.folder.run_folder import RunFolder


class NoStore:
    """A rendezvous of ranks that have nothing to say to each other."""

    address = None

    def open(self) -> None:
        pass


def run_fakes(folder: RunFolder, num_ranks: int, **settings: Any) -> dict[str, Any]:
    tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(num_ranks)]
    return run_tasks(folder, tasks, **settings)


def run_roles(folder: RunFolder, roles: str, **settings: Any) -> dict[str, Any]:
    """A chief that trains, and tasks that assist it; workers and the evaluator are replaced alone."""
    os.environ["FAKE_ROLES"] = roles
    counts: Counter[str] = Counter()
    tasks = [Task(role="chief", index=0, rank=0)]
    for rank, role in enumerate(roles.split(), start=1):
        tasks.append(Task(role=role, index=counts[role], rank=rank))
        counts[role] += 1
    alone = [task.rank for task in tasks if task.role in ("worker", "evaluator")]
    try:
        return run_tasks(folder, tasks, auxiliary_ranks=range(1, len(tasks)), replaceable=alone, **settings)
    finally:
        del os.environ["FAKE_ROLES"]


def run_tasks(
    folder: RunFolder, tasks: Sequence[Task], *, hang_timeout_s: float | Literal["auto"] = "auto", **settings: Any
) -> dict[str, Any]:
    folder.path.mkdir(exist_ok=True)
    agent_settings = AgentSettings(limits=TimeLimits(hang_timeout_s=hang_timeout_s), **settings)
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), str(folder.resolved)]
    result = supervise(folder.resolved, tasks, agent_settings, folder=folder, command=command, rendezvous=NoStore())
    return {key: value for key, value in result.items() if key != "restarts"}  # read from the folder where they matter


def launch(folder: RunFolder, num_ranks: int) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, returned once every worker has come to its first step."""
    command = [sys.executable, "-m", "tests.run.fake_launch", str(folder.path), str(num_ranks)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(folder.live.glob("pids_*"))) == num_ranks and len(pids_of(folder)) >= num_ranks)
    return process


def pids_of(folder: RunFolder) -> list[int]:
    """The processes that the workers of the last attempt recorded: themselves and their children."""
    return [int(pid) for path in sorted(folder.live.glob("pids_*")) for pid in path.read_text().split()]


def alive(pids: Iterable[int]) -> list[int]:
    """Processes that are neither gone nor zombies."""
    return [pid for pid in pids if _state(pid) not in ("gone", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def assert_no_process_is_left(folder: RunFolder, within_s: float = 60) -> None:
    pids = pids_of(folder)
    assert pids
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    survivors = alive(pids)
    for pid in survivors:
        os.kill(pid, 9)
    assert survivors == []
