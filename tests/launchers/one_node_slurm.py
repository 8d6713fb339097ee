"""SLURM with one node, this one: its three daemons as children of the test, in a folder of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launchers.joining import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The variables with which srun finds it; skips where a program is absent."""
    absent = [name for name in PROGRAMS if program(name) is None]
    if absent or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(absent) or 'slurm'}: apt-get install slurm-wlm munge")
    # not below pytest's folders: the path of a socket has 108 characters
    folder = Path(f"/run/trainkit-test-{os.getpid()}")
    folder.mkdir(mode=0o755)
    try:
        with contextlib.ExitStack() as stack:
            yield started(folder, stack)
    finally:
        shutil.rmtree(folder)


def started(folder: Path, stack: contextlib.ExitStack) -> dict[str, str]:
    host = socket.gethostname().partition(".")[0]
    stack.callback(end_steps, folder)
    conf = folder / "slurm.conf"
    ports = {"control_port": free_port(), "node_port": free_port()}
    conf.write_text(CONF.format(host=host, folder=folder, user="root", **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    daemon(
        stack, folder, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    )  # fmt: skip
    wait_for((folder / "munge.socket").exists, folder)
    daemon(stack, folder, "slurmctld", "-D", "-f", str(conf))
    daemon(stack, folder, "slurmd", "-D", "-f", str(conf), "-N", host)
    environ = {"SLURM_CONF": str(conf)}
    command = [str(program("sinfo")), "--noheader", "--format=%T"]
    wait_for(lambda: output(command, environ).strip() == "idle", folder)
    return environ


def daemon(stack: contextlib.ExitStack, folder: Path, name: str, *arguments: str) -> None:
    """A child that ends with the stack, and with it what it started."""
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen([str(program(name)), *arguments], stdout=out, stderr=out, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def end_steps(folder: Path) -> None:
    """End what still keeps a step, which no daemon ends with itself; it writes into slurmd's log."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            files = [str(file.readlink()) for file in (process / "fd").iterdir()]
            if (process / "comm").read_text().startswith("slurmstepd") and any(str(folder) in file for file in files):
                os.kill(int(process.name), signal.SIGKILL)


def wait_for(condition: Callable[[], object], folder: Path, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("*.[lo][ou][gt]"))
            )
            pytest.fail(f"SLURM did not start\n{logs}")
        time.sleep(0.1)


def output(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False).stdout


def program(name: str) -> str | None:
    """Debian puts daemons where a user's PATH does not look."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
