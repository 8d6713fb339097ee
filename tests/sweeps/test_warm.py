"""Jobs that are forks of a warm process: another number than that of a fresh process is caught here alone."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.support.results import result_of
from tests.support.settings import latest
from tests.support.waiting import wait_for
from tests.sweeps.support import assert_ends, run, sweep_in
from trainkit.run.process import fork_server
from trainkit.run.process.fork_server import send
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.launching import SharedWarmStarter, WarmStarter
from trainkit.sweeps.loop import LOG, JobCommand, Slots

pytestmark = pytest.mark.skipif(not WarmStarter.is_possible(), reason="forks of a warm process are of Linux")

TRAIN = ("recipe=null", "model.dropout=0.2", "steps=12", "callbacks=[]", "logger=[]")


def training(folder: Path, name: str, *overrides: str) -> SweepJob:
    arguments = latest(*TRAIN, *overrides, f"hydra.run.dir={folder / name}")
    command = (sys.executable, "-m", "trainkit", *arguments)
    return SweepJob(name=name, folder=folder / name, overrides=overrides, command=command)


def order(folder: Path, news: SimpleQueue[Any], *arguments: str) -> JobCommand:
    return JobCommand(number=1, command=(sys.executable, *arguments), environ={}, log=folder / LOG, report=news.put)


@pytest.mark.long
def test_a_fork_computes_what_a_fresh_process_does(tmp_path: Path) -> None:
    slots = Slots(count=1, num_threads=1)
    before = training(tmp_path, "before", "seed=7", "numerics.reproducible=true", "precision=fp64", "model.dropout=0.5")
    with WarmStarter(slots.threads) as start:
        start.share({"_target_": "trainkit.data.Digits", "scaling": "unit"})
        sweep = sweep_in(tmp_path, slots=slots, start=start)
        assert run(sweep, before, training(tmp_path, "fork", "seed=3")) == {"before": 0, "fork": 0}
    run(sweep_in(tmp_path / "other", slots=slots), training(tmp_path / "other", "fresh", "seed=3"))
    fork, fresh = result_of(tmp_path / "fork"), result_of(tmp_path / "other" / "fresh")
    assert fork["weights_sha256"] == fresh["weights_sha256"] != result_of(tmp_path / "before")["weights_sha256"]
    assert fork["metrics"] == fresh["metrics"]


def test_a_fork_ends_with_its_sweep(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.sweeps.support import *;"
        "from tests.sweeps.test_warm import *;"
        "place = Path(sys.argv[1]); slots = Slots(count=1, num_threads=1)\n"
        "with WarmStarter(slots.threads) as start: run(sweep_in(place, slots=slots, start=start), "
        "training(place, 'long', 'steps=1000000', 'log_every_steps=1'))"
    )
    lock, rows = tmp_path / "long/.lock", tmp_path / "long/metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL) as sweep:
        wait_for(rows.exists)
        pid = json.loads(lock.read_text())["pid"]
        os.kill(pid, 0)
        sweep.kill()
    assert_ends(pid)


def test_a_job_starts_afresh_where_the_warm_process_has_died(tmp_path: Path) -> None:
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with WarmStarter({}) as start:
        start.group.kill()
        job = start(order(tmp_path, news, "-m", "trainkit", "--version"))
        assert (news.get().code, (tmp_path / LOG).read_text()[:8]) == (0, "trainkit")
        job.kill()


def test_the_end_of_a_job_is_reported_once_if_the_warm_process_dies_during_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with WarmStarter({}) as start:

        def send_too_late(*arguments: Any, **options: Any) -> None:
            start.group.kill()
            start._reader.join(timeout=0.5)  # a listener that does not wait for the sender has reported by then
            send(*arguments, **options)

        monkeypatch.setattr(fork_server, "send", send_too_late)
        job = start(order(tmp_path, news, "-m", "trainkit", "--version"))
        assert (news.get().code, news.empty()) == (0, True)
        job.kill()


@pytest.mark.slow
def test_the_sweeps_of_a_block_share_one_process_and_a_dead_one_is_replaced() -> None:
    with SharedWarmStarter() as shared:
        first = shared.get({})
        assert shared.get({}) is first
        first.group.kill()
        wait_for(lambda: not first.is_alive)
        assert shared.get({}).is_alive


def test_a_job_is_ended_at_once_though_the_warm_process_hangs(tmp_path: Path) -> None:
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with WarmStarter({}) as start:
        start.group.signal(signal.SIGSTOP)
        job = start(order(tmp_path, news, "-m", "trainkit", "--version"))
        job.kill()
        assert news.get().code == -signal.SIGKILL
