"""A rank of an engine that is killed and never started again, or an orphan that it leaves, is caught here alone.

The engine has a few lines: it starts a process a rank, and all again when one fails.
"""

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import pytest

from tests.run.faking import assert_no_process_is_left
from tests.support import quick
from tests.support.present import present
from tests.support.verdicts import plain
from tests.support.waiting import wait_for
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, CrashLoopError, DataError, MissingExtraError, TrainingError
from trainkit.run.backends.engine import begin_attempt, run_on, wait_for_attempt
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process_backend import BackendJob, ProcessBackend


@dataclass(frozen=True, kw_only=True)
class Simple(ProcessBackend):
    name: ClassVar[str] = "Simple"
    packages: ClassVar[tuple[str, ...]] = ("trainkit",)
    extra: ClassVar[str] = "simple"
    broken: bool = False
    host: ClassVar[str] = "127.0.0.1"

    @contextlib.contextmanager
    def connect(self, *, num_ranks: int, uses_gpus: bool) -> Iterator[Self]:
        yield self

    def run(self, job: BackendJob) -> None:
        if self.broken:
            raise RuntimeError("no room for 2 workers\n\tat org.apache")
        for _ in range(job.max_restarts + 1):
            attempt = begin_attempt(job.payload, "key")
            assert wait_for_attempt(job.payload, "key") == attempt
            arguments = map(json.dumps, (job.payload, job.num_ranks, attempt))
            command = quick.command(*arguments, module="tests.engines.started")
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return
        raise RuntimeError("a worker failed")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run_folder = RunFolder(tmp_path / "run")
    run_folder.path.mkdir()
    return run_folder


def train(
    folder: RunFolder, *, num_ranks: int = 2, engine: ProcessBackend | None = None, **supervisor: Any
) -> dict[str, Any]:
    cfg = RunConfig.from_dict({"supervisor": {"max_restarts": 1, **supervisor}})
    tasks = tuple(Task(role="worker", index=number, rank=number) for number in range(num_ranks))
    return run_on(engine or Simple(), cast("RunPlan", SimpleNamespace(tasks=tasks, cfg=cfg)), folder)


def test_a_killed_rank_is_named_and_all_start_again(
    folder: RunFolder, fake: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake("steps=6 save=2 pause=0.05", fail="rank=1,step=3,phase=forward,attempt=0,action=kill")
    result = train(folder)
    assert (result["status"], result["attempt"]) == ("finished", 1)
    assert [(row["kind"], row["rank"], row["checkpoint"]) for row in result["restarts"]] == [("all", 1, 2)]
    message = "rank 1 was ended by SIGKILL in step 3 (forward). Simple starts all again."
    assert message in plain(capsys.readouterr().out)


def test_an_exception_that_comes_again_is_not_started_a_third_time(
    folder: RunFolder, fake: Callable[..., None]
) -> None:
    fake("steps=6 save=1 pause=0.02", raising="1:ValueError:bad sample")
    with pytest.raises(CrashLoopError, match="gave up: rank 1 raised the same exception twice in the same place"):
        train(folder, max_restarts=5)
    assert len(present(folder.read_result())["restarts"]) == 1


@pytest.mark.long
def test_an_engine_that_gives_up_says_who_failed(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 pause=0.02", fail="rank=1,step=3,phase=forward,action=exit")
    with pytest.raises(CrashLoopError, match=r"gave up after 1 restarts: rank 1 .*exited with code 7 in step 3"):
        train(folder)
    assert present(folder.read_result())["status"] == "failed"
    assert_no_process_is_left(folder)


@pytest.mark.long
def test_a_trainkit_error_keeps_its_class_and_is_retried_at_most_once(
    folder: RunFolder, fake: Callable[..., None]
) -> None:
    fake("steps=6", raising="1:DataError:/gone")
    with pytest.raises(DataError, match=r"^/gone$"):
        train(folder, max_restarts=5)


@pytest.mark.long
def test_a_hanging_rank_is_ended(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 pause=0.02", fail="rank=1,step=3,phase=forward,action=hang")
    with pytest.raises(TrainingError, match="has made no progress for"):
        train(folder, max_restarts=0, hang_timeout_s=0.5)


def test_the_message_of_the_engine_is_reported_without_its_frames(folder: RunFolder, fake: Callable[..., None]) -> None:
    with pytest.raises(TrainingError, match=r"^Simple ended the run: no room for 2 workers$"):
        train(folder, engine=Simple(broken=True))


def test_a_request_to_stop_reaches_the_ranks(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("steps=1000 pause=0.01")
    flag = SimpleNamespace(requested=None)
    monkeypatch.setattr("trainkit.run.backends.engine.StopFlag", lambda: contextlib.nullcontext(flag))

    def preempt() -> None:
        wait_for(lambda: len(list(folder.live.glob("pids_*"))) == 2)
        time.sleep(0.1)
        flag.requested = "preempted"

    thread = threading.Thread(target=preempt)
    thread.start()
    assert train(folder) == {"status": "preempted", "attempt": 0, "restarts": []}
    thread.join()


def test_an_engine_that_is_not_installed_or_was_started_by_a_launcher_is_refused() -> None:
    class Absent(Simple):
        packages = ("trainkit", "no_such_package")

    with pytest.raises(MissingExtraError, match=r"needs the package no_such_package\. Install it: pip"):
        Absent().launch({})
    hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    with pytest.raises(ConfigError, match=r"RANK and WORLD_SIZE started 2\. Start it once\."):
        Simple().launch(hand)
