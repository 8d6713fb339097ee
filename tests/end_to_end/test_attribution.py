"""A rank blamed for what another did, and two causes for one end, are caught here alone: whole runs name the rank that
failed, with one cause on the screen, in result.json and in the exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.attribution import HANGS, KINDS, MLP, STEP, launch, mirrored, outcome, train
from tests.support.descendants import descendants
from tests.support.verdicts import plain
from tests.support.waiting import wait_for

STRATEGIES = {
    "fsdp": ("strategy=fsdp", "strategy.replicas=2", *MLP),
    "tensor_parallel": ("strategy=tensor_parallel", "strategy.degree=2", "strategy.replicas=1", *MLP),
    "pipeline": ("strategy=pipeline", *MLP),
    "local_sgd": ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=4", *MLP),
}
SHORT = ("raised 'peer'", "exited 0", "extra collective")


def _limit(kind: str) -> float:
    """The limit of a hang where none is planted is so long that a busy machine does not meet it."""
    return 5 if kind in HANGS else 60


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long) for kind in KINDS]
)
def test_of_two_ranks_the_one_that_failed_is_named(cwd: Path, kind: str) -> None:
    loader = "loader.num_workers=1" if kind == "loader hang" else "loader.num_workers=0"
    assert train(cwd, f"{kind}:1:{STEP}", *mirrored(2, hang_timeout_s=_limit(kind)), loader).problems(kind, 1) == []


# each way to wait for the others once, with a kind of its own
@pytest.mark.long
@pytest.mark.parametrize(("kind", "strategy"), [
    ("raised 'peer'", "fsdp"), ("killed", "pipeline"), ("stopped", "local_sgd"),
    pytest.param("exited 0", "tensor_parallel", marks=pytest.mark.matrix),
])  # fmt: skip
def test_under_other_strategies_that_rank_is_named(cwd: Path, kind: str, strategy: str) -> None:
    overrides = (*STRATEGIES[strategy], f"supervisor.hang_timeout_s={_limit(kind):g}")
    assert train(cwd, f"{kind}:1:{STEP}", *overrides).problems(kind, 1) == []


@pytest.mark.long
def test_one_process_whose_loader_hangs_ends_by_itself(cwd: Path) -> None:
    settings = ("model=net", "supervisor.hang_timeout_s=5", "steps=99", "loader.num_workers=1")
    ended = train(cwd, "loader hang:-1:30", *settings)  # after the passes that show what the model does
    assert (ended.code, ended.status) == (5, "failed")
    assert "rank 0 has made no progress for " in plain(ended.reason)


@pytest.mark.long
def test_a_server_of_parameters_that_is_stopped_is_named(cwd: Path) -> None:
    servers = ("model=net", "strategy=parameter_server", "strategy.servers=1", "strategy.workers=2")
    settings = (*servers, "strategy.timeout_s=8", "checkpoint.every_steps=20", "steps=100000")
    process = launch(cwd, "none:0:0", *settings, quickly=False)
    wait_for((cwd / "run/checkpoints/step_00000020").exists, process)
    server = next(pid for pid, name in descendants(process.pid).items() if name == "ps:0")
    os.kill(server, signal.SIGSTOP)
    ended = outcome(cwd, process)
    first = ended.reason.splitlines()[0]
    assert f"(pid {server} on " in first, ended.screen
    assert "is stopped by a signal (state T)" in first
    assert first in ended.screen
    assert (ended.status, ended.code) == ("failed", 5)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of v1 with less memory than a rank that eats it up; where the tests may make one."""
    group = Path("/sys/fs/cgroup/memory") / f"trainkit_{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(4 << 30))  # the kernel kills the largest: the eater, by far
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield group
    for _ in range(100):  # it is busy until the kernel has ended its last process
        with contextlib.suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.1)


@pytest.mark.long
def test_a_rank_killed_by_the_memory_limit_of_its_cgroup_is_reported_as_out_of_memory(cwd: Path, cgroup: Path) -> None:
    within = ["/bin/sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    fault, settings = f"out of memory:1:{STEP}", mirrored(2, hang_timeout_s=60)
    assert outcome(cwd, launch(cwd, fault, *settings, quickly=False, within=within)).problems("out of memory", 1) == []
