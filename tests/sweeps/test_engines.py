"""Jobs that another system runs: one that outlives its sweep, or whose end is never told, is caught here alone."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import pytest

import hydra_plugins.trainkit_engines as plugin
import trainkit
from tests.sweeps.support import POLITE, waiting_for
from trainkit.config.compose import Composer
from trainkit.config.compose.jobs import ComposedConfigLoader
from trainkit.errors import ConfigError
from trainkit.extras import install_command
from trainkit.sweeps.backends.base import JobBackend
from trainkit.sweeps.backends.job_spec import Driver, JobSpec, exit_code_file, run_described
from trainkit.sweeps.backends.launching import ENGINES, Remote
from trainkit.sweeps.loop.processes import JobCommand

WAITS = "import time; time.sleep(60)"


def engine_class(launcher: str) -> type[JobBackend]:
    module, name = ENGINES[launcher]
    found: type[JobBackend] = getattr(import_module(f"trainkit.sweeps.backends.{module}"), name)
    return found


def described(folder: Path, code: str, *words: object, driver: Driver | None = None) -> Path:
    path = folder / "1.json"
    JobSpec(
        command=(sys.executable, "-c", code, *map(str, words)),
        environ={"GIVEN": "7"},
        cwd=str(folder),
        log="run/output.log",
        driver=driver or Driver.here(),
    ).write(path)
    return path


class InThreads:
    """An engine that runs each job in a thread of this process, or loses it."""

    def __init__(self, loses: bool = False) -> None:
        self.loses = loses
        self.threads: list[threading.Thread] = []
        self.requested: list[int] = []

    def submit(self, path: str, *, slots: int) -> Self:
        self.requested.append(slots)
        if not self.loses:
            thread = threading.Thread(target=run_described, args=(path,))
            thread.start()
            self.threads.append(thread)
        return self

    def lost(self) -> str | None:
        return "the node is gone" if self.loses else None

    def cancel(self) -> None:
        return


@contextlib.contextmanager
def started(folder: Path, code: str, *words: object, loses: bool = False) -> Iterator[tuple[Any, Callable[[], Any]]]:
    ends: SimpleQueue[Any] = SimpleQueue()
    engine = InThreads(loses)
    remote = Remote(folder, lambda _: 2)
    with remote.connected(engine):
        command = [sys.executable, "-c", code, *map(str, words)]
        job = remote(
            JobCommand(number=5, command=command, environ={}, log=folder / "0" / "output.log", report=ends.put)
        )
        yield job, lambda: ends.get(timeout=60)
    for thread in engine.threads:
        thread.join()
    assert engine.requested == [2]


def test_a_described_job_runs_with_its_variables_and_leaves_its_code_and_output(tmp_path: Path) -> None:
    path = described(tmp_path, "import os, sys; print(os.environ['GIVEN']); sys.exit(3)")
    assert run_described(str(path)) == 3
    assert exit_code_file(path).read_text() == "3"
    assert (tmp_path / "run/output.log").read_text() == "7\n"


def test_a_run_that_has_begun_goes_on_and_one_that_was_killed_before_keeps_its_folder(tmp_path: Path) -> None:
    path = described(tmp_path, "import pathlib, sys; sys.exit(pathlib.Path('run/.lock').exists())")
    told = JobSpec.read(path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    assert (told.line, run_described(str(path))) == (told.command, 0)
    (tmp_path / "run/resolved.yaml").touch()
    assert told.line == (*told.command, "resume=auto")


def test_a_job_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    here = Driver.here()
    gone = Driver(host=here.host, pid=here.pid, begun="1")
    assert run_described(str(described(tmp_path, WAITS, driver=gone))) == -signal.SIGKILL
    assert Driver(host="elsewhere", pid=here.pid, begun="1").is_gone is False


def test_the_end_of_a_job_is_reported_once(tmp_path: Path) -> None:
    with started(tmp_path, "raise SystemExit(4)") as (job, ended):
        told = ended()
        assert (told.attempt, told.code) == (5, 4)
        job.kill()  # it has ended: nothing to do


def test_a_job_can_be_interrupted_and_killed(tmp_path: Path) -> None:
    with started(tmp_path, POLITE, tmp_path) as (job, ended):
        waiting_for(tmp_path / "here")
        job.signal(signal.SIGINT)
        assert ended().code == 130
    with started(tmp_path, WAITS) as (job, ended):
        assert job.path.stat().st_mode & 0o077 == 0  # an argument may be a secret
        job.kill()
        assert ended().code == -signal.SIGKILL
    assert list(job.path.parent.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_its_engine_lost_has_failed_and_says_why(tmp_path: Path) -> None:
    with started(tmp_path, WAITS, loses=True) as (_, ended):
        assert ended().code == 1
    assert (tmp_path / "0/output.log").read_text() == "the node is gone\n"


def refused(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_the_keys_of_a_launcher_are_those_of_its_class_and_others_are_refused_together() -> None:
    for launcher in ENGINES:
        kind = engine_class(launcher)
        assert plugin._KEYS[launcher] == {one.name: getattr(kind(), one.name) for one in fields(kind)}
    told = refused(engine_class("submitit_slurm").of, {"node": 1, "nodes": 0, "partition": 3})
    assert "Did you mean hydra.launcher.nodes?" in told
    assert "hydra.launcher.nodes=0: must be at least 1" in told
    assert "hydra.launcher.partition=3: must be text" in told


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher, extra in (("ray", "ray"), ("submitit_local", "slurm")):
        monkeypatch.setattr(kind := engine_class(launcher), "packages", ("no_such_package",))
        assert install_command(extra, "") in refused(kind().require)
    monkeypatch.setattr(kind := engine_class("submitit_slurm"), "packages", ())
    monkeypatch.setenv("PATH", "")
    assert "no sbatch here" in refused(kind().require)


def test_a_cluster_with_a_launcher_is_handed_a_single_run_too_and_its_job_trains() -> None:
    run = trainkit.compose(["cluster=slurm", "hydra.launcher.partition=gpu", "sweep.retries=1"])
    assert (run.is_sweep, run.launcher) == (True, "submitit_slurm")
    assert "hands runs to the launcher submitit_slurm" in refused(trainkit.train, run)
    command = ComposedConfigLoader(Composer()).command(["cluster=slurm", "hydra.launcher.partition=gpu"], Path("job"))
    assert command[3:] == ("cluster=slurm", "hydra.mode=RUN", "hydra.run.dir=job")
    assert not trainkit.compose(command[3:5]).is_sweep
