"""A run that does not go on with one Ray node fewer, or does not take a new one, is caught here alone."""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.test_engines import needs
from tests.support import quick
from tests.support.present import present
from tests.support.results import sha256
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RUN = (
    "recipe=digits", "epochs=60", "numerics.reproducible=true", "batch.micro_size=16", "checkpoint.every_steps=50",
    "model.dropout=0.1", "log_every_steps=20", "eval.every_epochs=null", "callbacks=[]", "logger=[]",
)  # fmt: skip
ELASTIC = ("strategy=mirrored", "strategy.replicas=2", "elastic.min_replicas=1", "elastic.retry_s=3")


def train(folder: str, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(quick.command(*RUN, f"hydra.run.dir={folder}", "quiet=true", *more))


@contextlib.contextmanager
def ray_cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A head with room for one replica, in a process of its own that is told to add and remove further nodes."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path: sockets stand in it
        command = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), folder]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            yield process, present(process.stdout).readline().strip()
        finally:
            present(process.stdin).close()
            process.wait()
            present(process.stdout).close()


def send(cluster: subprocess.Popen[str], command: str) -> None:
    print(command, file=cluster.stdin, flush=True)
    assert present(cluster.stdout).readline() == "done\n"


def newest() -> int:
    return max((int(path.name[5:]) for path in Path("run/checkpoints").glob("step_*")), default=0)


def sizes() -> list[int]:
    """The numbers of replicas that the run has had, one after the other."""
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [size for size, _ in itertools.groupby(row["replicas"] for row in rows if "replicas" in row)]


def test_a_node_is_lost_and_another_comes_and_no_bit_is_another(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("ray", "pyarrow")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    assert train("alone").wait() == 0
    slow = Path("slow").absolute()  # else a quick machine is done before there is a second node
    monkeypatch.setenv("TRAINKIT_FAIL", f"phase=data,while={slow},action=slow")
    with ray_cluster() as (cluster, address):
        send(cluster, "add")
        process = train("run", "cluster=ray", f"cluster.address={address}", *ELASTIC)
        wait_for(lambda: newest() >= 100, process)
        slow.touch()
        send(cluster, "remove")
        wait_for(lambda: sizes() == [2, 1], process)
        send(cluster, "add")
        wait_for(lambda: sizes() == [2, 1, 2], process)
        slow.unlink()
        assert process.wait(400) == 0
    assert sizes() == [2, 1, 2]
    assert sha256("run") == sha256("alone")
