"""Ranks forked from one process that compute other bits, or outlive who started them, are caught here alone."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

import pytest

from tests.contract.running import run
from tests.support.descendants import descendants
from tests.support.results import result_of
from tests.support.verdicts import plain
from tests.support.waiting import wait_for
from trainkit.run.process.fork_server import ForkServerClient

pytestmark = pytest.mark.skipif(not ForkServerClient.is_possible(), reason="ranks are forks on Linux alone")

TRAIN = ["strategy=mirrored", "strategy.replicas=2", "data=points", "model=net", "batch.micro_size=4", "seed=5"]
LONG = [
    sys.executable, "-m", "trainkit", "recipe=null", "strategy=mirrored", "strategy.replicas=2", "callbacks=[]",
    "logger=[]", "quiet=true", "eval.every_epochs=null", "checkpoint.every_steps=20",
]  # fmt: skip
LAST = 400

Training = tuple[subprocess.Popen[str], Path, int, dict[str, int]]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A long run that has written a checkpoint; the process ids of its fork server and of its ranks."""
    folder = tmp_path / "run"
    with subprocess.Popen(
        [*LONG, f"steps={LAST}", f"hydra.run.dir={folder}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: list(folder.glob("checkpoints/step_*")), process)
        children = descendants(process.pid)
        pids = {name: pid for pid, name in children.items() if name.startswith("worker:")}
        (server,) = (pid for pid in children if pids.keys() & set(descendants(pid).values()))
        yield process, folder, server, pids
        process.kill()


@pytest.mark.long
def test_forked_ranks_compute_what_fresh_processes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = run(tmp_path / "forks", *TRAIN)
    monkeypatch.setattr(ForkServerClient, "is_possible", lambda: False)
    fresh = run(tmp_path / "fresh", *TRAIN)
    assert forks["weights_sha256"] == fresh["weights_sha256"]
    assert forks["metrics"] == fresh["metrics"]


BEFORE_A_FORK = {
    "pass": True,
    "torch.ones(10) + 1": True,
    "torch.ones(3, requires_grad=True).sum().backward()": True,
    "numpy.ones((500, 500)) @ numpy.ones((500, 500))": True,  # the threads of OpenBLAS end at a fork
    "torch.set_num_threads(2); torch.ones(1000, 1000) @ torch.ones(1000, 1000)": False,
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()": False,
    "torch.cuda.is_initialized = lambda: True": False,
    "torch.cuda.device_count = lambda: 1": False,
    "sys.stdout = io.StringIO()": False,
}
"""What a process does after its imports -> whether the ranks are forks of it."""
FORKING = """
import io, numpy, os, sys, threading, time, torch
from trainkit.run.fork_server_main import run_command
from trainkit.run.process import fork_server as template
def command():
    exec(code)
    with template.template(("torch",)):
        os.write(1, b"%d" % len(template._free))
    return 0
for code in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        os._exit(run_command(command))
    os.waitpid(pid, 0)
"""


def test_only_a_process_with_one_thread_and_no_gpu_is_forked() -> None:
    command = [sys.executable, "-c", FORKING, *BEFORE_A_FORK]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ([digit == "1" for digit in process.stdout], process.stderr) == ([*BEFORE_A_FORK.values()], "")


def test_a_process_with_more_files_than_select_takes_forks(tmp_path: Path) -> None:
    limits, codes = resource.getrlimit(resource.RLIMIT_NOFILE), Queue[int]()
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
        while stack.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        client = stack.enter_context(ForkServerClient((), os.environ))
        client.fork(("platform",), os.environ, tmp_path / "log", codes.put)
        assert codes.get(timeout=120) == 0
    assert "Linux" in (tmp_path / "log").read_text()


def test_ranks_of_the_command_line_import_nothing_again(tmp_path: Path) -> None:
    overrides = ("strategy=mirrored", "strategy.replicas=2", "steps=3", "callbacks=[]", "logger=[]")
    command = [sys.executable, "-m", "trainkit", "recipe=null", *overrides, f"hydra.run.dir={tmp_path}/run"]
    watched = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.run(command, env=watched, capture_output=True, text=True, check=True)
    assert sum(line.endswith("| torch") for line in process.stderr.splitlines()) == 1


def test_a_rank_that_dies_is_forked_again_by_the_same_process(training: Training) -> None:
    process, folder, server, pids = training
    os.kill(pids["worker:1"], signal.SIGKILL)
    wait_for(lambda: _are_two_ranks(children := descendants(server)) and not {*children} & {*pids.values()}, process)
    _, output = process.communicate(timeout=120)
    assert "rank 1 was ended by SIGKILL" in plain(output)
    assert result_of(folder)["steps"] == LAST


@pytest.mark.long
def test_the_run_restarts_with_a_new_fork_server_after_the_first_one_dies(training: Training) -> None:
    process, folder, server, pids = training
    os.kill(server, signal.SIGKILL)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Restarting from the checkpoint of step" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert result_of(folder)["steps"] == LAST


@pytest.mark.long
def test_all_end_with_the_supervisor(training: Training) -> None:
    process, _, server, pids = training
    process.kill()
    process.wait()
    wait_for(lambda: not any(_runs(pid) for pid in (server, *pids.values())))


def _are_two_ranks(children: dict[int, str]) -> bool:
    return sorted(children.values()) == ["worker:0", "worker:1"]


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return " Z " not in status.read_text()
    except OSError:
        return False
