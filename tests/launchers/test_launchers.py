"""A launcher whose processes make two runs, or other bits than mirrored, is caught here alone: each for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers.joining import free_port
from tests.launchers.one_node_slurm import slurm
from tests.launchers.two_hosts import two_hosts
from tests.support import quick
from tests.support.results import sha256
from tests.support.settings import latest
from tests.support.verdicts import plain
from tests.support.waiting import wait_for

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
FIXED = (
    "recipe=null", "steps=12", "batch.micro_size=16", "model.dropout=0.2", "numerics.reproducible=true",
    "callbacks=[]", "logger=[]",
)  # fmt: skip
RUN = (*FIXED, "strategy=multi_worker_mirrored", "hydra.run.dir=run")
TRAINKIT = ("-m", "trainkit", *RUN)
PYTHON = (sys.executable, *TRAINKIT)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
KILLED = 139
"""Exit code of the command that stands for a process which was killed."""


def environ(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ(**variables), stdout=pipe, stderr=pipe, text=True)


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """What each one wrote to its standard error; all ended well."""
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [error for _, error in outputs]


def detected(text: str) -> str:
    """The line that says what was found, without what differs from run to run."""
    (line,) = [line for line in text.splitlines() if line.startswith("launch by")]
    return line.partition(", rendezvous at")[0]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of mirrored on one host."""
    folder = tmp_path_factory.mktemp("mirrored")
    command = quick.command(*FIXED, "strategy=mirrored", "strategy.replicas=2", "quiet=true", "hydra.run.dir=run")
    subprocess.run(command, env=environ(), check=True, cwd=folder)
    return sha256(folder / "run")


@pytest.fixture
def check_run(cwd: Path, mirrored: str) -> Callable[[], None]:
    """Hold what is in the current folder to the promise."""

    def check() -> None:
        assert [path.parent.name for path in cwd.rglob("resolved.yaml")] == ["run"]
        assert len(list(cwd.rglob(".hydra"))) == 1
        assert sha256("run") == mirrored

    return check


@pytest.mark.parametrize("lost", [0, 1])
def test_torchrun_starts_again_what_was_killed(check_run: Callable[[], None], lost: int) -> None:
    planted = f"rank={lost},step=7,phase=reduce,action=kill,attempt=0"
    trainkit = TRAINKIT if lost else ("--no-python", *quick.command(*RUN))  # where it matters, a signal reaches rank 0
    command = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", "--max-restarts=1", *trainkit)
    (errors,) = ended(start(*command, "checkpoint.every_steps=3", TRAINKIT_FAIL=planted))
    assert errors.count("launch by torchrun: rank 0 of 2") == 2
    check_run()
    notes = json.loads(Path("run/environment.json").read_text())["notes"]
    assert notes[-1:] == [f"restarted by the launcher: continues {Path('run').absolute()}"]


def test_mpirun(check_run: Callable[[], None]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *quick.command(*RUN))
    (errors,) = ended(start(*command))
    assert detected(errors) == "launch by Open MPI: rank 0 of 2 on one host"
    check_run()


def test_mpiexec_of_mpich(check_run: Callable[[], None]) -> None:
    if shutil.which("mpiexec.mpich") is None:
        pytest.skip("needs mpiexec.mpich: apt-get install mpich")
    (errors,) = ended(start("mpiexec.mpich", "-n", "2", *quick.command(*RUN), MASTER_PORT=str(free_port())))
    assert detected(errors) == "launch by MPICH: rank 0 of 2 on one host"
    check_run()


def test_srun(check_run: Callable[[], None]) -> None:
    with slurm() as variables:
        (errors,) = ended(start("srun", "--ntasks=2", *quick.command(*RUN), **variables))
    assert detected(errors) == "launch by SLURM: rank 0 of 2 on one host"
    check_run()


def test_containers_are_detected_by_pet_variables(check_run: Callable[[], None]) -> None:
    group = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    errors = ended(*(start(*quick.command(*RUN), **group, PET_NODE_RANK=str(rank)) for rank in range(2)))
    assert detected(errors[0]) == "launch by PET_NNODES: rank 0 of 2 on 2 hosts"
    check_run()


def test_two_hosts(check_run: Callable[[], None]) -> None:
    with two_hosts() as hosts:
        spec = ("cluster=spec", f"cluster.worker=[{','.join(f'{host.address}:2222' for host in hosts)}]")
        processes = [
            start(*host.command(*PYTHON, *spec, f"cluster.task=worker:{index}")) for index, host in enumerate(hosts)
        ]
        errors = ended(*processes)
    assert detected(errors[0]) == "launch by cluster=spec: rank 0 of 2 on 2 hosts"
    check_run()


def test_a_signal_to_one_process_saves_and_stops_them_all(cwd: Path) -> None:
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    long = latest(*RUN, "steps=100000", "checkpoint.every_steps=20")
    commands = (quick.command(*long), (sys.executable, "-m", "trainkit", *long))  # a signal must reach the second
    processes = [start(*command, RANK=str(rank), **hand) for rank, command in enumerate(commands)]
    wait_for(lambda: any((cwd / "run/checkpoints").glob("step_*")), *processes)
    processes[1].send_signal(signal.SIGINT)
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [130, 130], outputs
    result = json.loads((cwd / "run/result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "Ctrl-C")
    assert result["last"].endswith(f"step_{result['steps']:08d}")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_is_missed_and_named_by_the_other(cwd: Path, lost: int) -> None:
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    planted = {"TRAINKIT_FAIL": f"rank={lost},step=5,phase=reduce,action=kill"}
    processes = [start(*quick.command(*RUN), RANK=str(rank), **hand, **planted) for rank in range(2)]
    outputs = [process.communicate(timeout=180)[1] for process in processes]
    assert (processes[lost].returncode, processes[1 - lost].returncode) == (KILLED, 1), outputs
    message = f"rank {lost} has ended in step 5 (reduce) without an error report."
    assert message in plain(outputs[1 - lost]).splitlines()


def test_a_cut_cable_ends_both_hosts_and_each_names_the_other(cwd: Path) -> None:
    long = latest(
        *PYTHON, "steps=100000", "checkpoint.every_steps=20", "eval.every_epochs=null", "strategy.timeout_s=8"
    )
    with two_hosts() as hosts:
        spec = ("cluster=spec", f"cluster.worker=[{','.join(f'{host.address}:2222' for host in hosts)}]")
        processes = [
            start(*host.command(*long, *spec, f"cluster.task=worker:{index}")) for index, host in enumerate(hosts)
        ]
        wait_for(lambda: any((cwd / "run/checkpoints").glob("step_*")), *processes)  # early ones are deleted soon
        hosts[1].unplug()
        outputs = [process.communicate(timeout=180)[1] for process in processes]
    assert [process.returncode for process in processes] == [5, 5], outputs
    for rank, text in enumerate(outputs):
        assert any(
            line.startswith(f"rank {1 - rank} stopped answering in step") for line in plain(text).splitlines()
        ), text
