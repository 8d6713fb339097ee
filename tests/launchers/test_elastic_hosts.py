"""A host of torchrun that is lost and costs a bit, or is not let in again, is caught here alone."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launchers.test_launchers import FIXED, TORCHRUN, environ
from tests.launchers.two_hosts import Host, two_hosts
from tests.support import quick
from tests.support.descendants import descendants
from tests.support.results import sha256
from tests.support.settings import latest
from tests.support.verdicts import plain
from tests.support.waiting import wait_for

pytestmark = pytest.mark.engine

STEPS = 3000
RUN = latest(*FIXED, f"steps={STEPS}", "checkpoint.every_steps=100", "eval.every_epochs=null")
# Agents that share the store of their rendezvous never let a host back in: torch's own limit (2.13).
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(host: Host, leads: bool, first: Host) -> subprocess.Popen[bytes]:
    """An agent of torchrun's, alone in its session: to kill all of it is to lose the host."""
    rendezvous = (
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-id=job7", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:29400", f"--rdzv-conf=is_host={int(leads)},last_call_timeout=2",
        f"--local-addr={host.address}",
    )  # fmt: skip
    trainkit = ("-m", "trainkit", *RUN, "strategy=multi_worker_mirrored", "hydra.run.dir=run")
    with Path(f"{host.name}.log").open("ab") as log:
        return subprocess.Popen(
            host.command(*TORCHRUN, *rendezvous, *trainkit),
            env=environ(**VARIABLES), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants at once."""
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def newest() -> int:
    return max((int(path.name[5:]) for path in Path("run/checkpoints").glob("step_*")), default=0)


def test_a_host_is_lost_and_another_comes_and_no_bit_is_another(cwd: Path) -> None:
    alone = quick.command(*RUN, "strategy=one_device", "hydra.run.dir=alone", "quiet=true")
    subprocess.run(alone, env=environ(), check=True)
    with two_hosts() as (first, second), contextlib.ExitStack() as stack:
        leading, following = agent(first, True, first), agent(second, False, first)
        stack.callback(lose, leading)
        stack.callback(lose, following)
        wait_for(lambda: newest() >= 300, leading)
        lose(following)
        later = newest() + 300
        wait_for(lambda: newest() >= later, leading)
        returned = agent(second, False, first)
        stack.callback(lose, returned)
        assert (leading.wait(240), returned.wait(60)) == (0, 0)
        log = Path(f"{first.name}.log").read_text()
    launches = [line for line in log.splitlines() if line.startswith("launch by torchrun: rank 0")]
    assert [line.split()[6] for line in launches] == ["2", "1", "2"]
    assert "rank 0 of 2 on 2 hosts" in launches[0]
    assert "rank 1 stopped answering in step" in plain(log)
    assert [path.parent.name for path in sorted(cwd.rglob("resolved.yaml"))] == ["alone", "run"]
    assert sha256("run") == sha256("alone")
