"""Jobs that another system runs: one that outlives its sweep, or whose end is never told, is caught here alone.
Which devices a job gets: two jobs on one GPU, or more jobs at once than slots, are caught here alone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import hydra_plugins.trainkit_launchers as plugin
import trainkit
from tests.support.refusing import refused
from tests.support.waiting import wait_for
from tests.sweeps.support import POLITE, job, run, sweep_in
from trainkit.cluster.tasks import Task
from trainkit.config.compose import Composer, compose
from trainkit.config.compose.jobs import ComposedConfigLoader
from trainkit.config.sections import SweepConfig as Settings
from trainkit.errors import ConfigError, Problem
from trainkit.extras import install_command
from trainkit.run.estimates.this_machine import crowding_problems
from trainkit.run.planning.plan import make_plan
from trainkit.run.task import limit_memory
from trainkit.sweeps.backends import ENGINES, Handle, Remote, Submit
from trainkit.sweeps.job_spec import JobSpec, run_described, this_process
from trainkit.sweeps.launching import numbering_problems
from trainkit.sweeps.loop import JobCommand, Slots
from trainkit.trained.build import meta_model

WAITS = "import time; time.sleep(60)"


def described(folder: Path, code: str, *arguments: object, started: int | None = None) -> Path:
    path = folder / "1.json"
    JobSpec(
        command=(sys.executable, "-c", code, *map(str, arguments)),
        environ={"GIVEN": "7"},
        cwd=str(folder),
        log="run/output.log",
        waiting=(*this_process()[:2], this_process()[2] if started is None else started),
    ).write(path)
    return path


def in_threads(pool: ThreadPoolExecutor, *, loses: bool) -> Submit:
    """Return an engine that runs its jobs in threads of this process, or loses them."""

    def submit(jobs: Sequence[tuple[str, int]]) -> list[Handle]:
        ((path, slots),) = jobs
        assert slots == 2
        code = pool.submit(run_described, path)

        def ended() -> int | None:
            if loses:
                raise RuntimeError("the node is gone")
            return code.result() if code.done() else None

        return [Handle(ended, lambda: None)]

    return submit


@contextlib.contextmanager
def started(folder: Path, code: str, *args: object, loses: bool = False) -> Iterator[tuple[Any, Callable[[], Any]]]:
    ends: SimpleQueue[Any] = SimpleQueue()
    with (
        ThreadPoolExecutor() as pool,
        Remote(in_threads(pool, loses=loses), folder / ".jobs") as remote,
    ):
        command = [sys.executable, "-c", code, *map(str, args)]
        job = remote(
            JobCommand(number=5, command=command, environ={}, log=folder / "0" / "output.log", report=ends.put, slots=2)
        )
        yield job, lambda: ends.get(timeout=60)


def test_a_described_job_runs_with_its_variables_and_leaves_its_output(tmp_path: Path) -> None:
    assert run_described(str(described(tmp_path, "import os, sys; print(os.environ['GIVEN']); sys.exit(3)"))) == 3
    assert (tmp_path / "run/output.log").read_text() == "7\n"


def test_a_run_that_has_begun_goes_on_and_one_that_was_killed_before_keeps_its_folder(tmp_path: Path) -> None:
    code = "import pathlib, sys; print(*sys.argv[1:]); sys.exit(pathlib.Path('run/.lock').exists())"
    path = str(described(tmp_path, code, "one"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    assert run_described(path) == 0
    (tmp_path / "run/resolved.yaml").touch()
    run_described(path)
    assert (tmp_path / "run/output.log").read_text() == "one\none resume=auto\n"


def test_a_job_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    assert run_described(str(described(tmp_path, WAITS, started=1))) == -signal.SIGKILL


def test_the_end_of_a_job_is_reported_once(tmp_path: Path) -> None:
    with started(tmp_path, "raise SystemExit(4)") as (job, ended):
        end = ended()
        assert (end.attempt, end.code) == (5, 4)
        job.kill()  # it has ended: nothing to do


def test_a_job_can_be_interrupted_and_killed(tmp_path: Path) -> None:
    with started(tmp_path, POLITE, tmp_path) as (job, ended):
        wait_for((tmp_path / "here").exists)
        job.signal(signal.SIGINT)
        assert ended().code == 130
    with started(tmp_path, WAITS) as (job, ended):
        wait_for(lambda: job.handle is not None)
        assert job.path.stat().st_mode & 0o077 == 0  # an argument may be a secret
        job.kill()
        assert ended().code == -signal.SIGKILL
    assert list(job.path.parent.iterdir()) == []


def test_jobs_that_come_together_are_one_array_and_one_that_is_killed_before_is_not_submitted(tmp_path: Path) -> None:
    batches: list[int] = []

    def submit(jobs: Sequence[tuple[str, int]]) -> list[Handle]:
        batches.append(len(jobs))
        return [Handle(lambda: 0, lambda: None)] * len(jobs)

    ends: SimpleQueue[Any] = SimpleQueue()
    with Remote(submit, tmp_path / ".jobs") as remote:
        orders = [
            JobCommand(number=number, command=[], environ={}, log=tmp_path / "log", report=ends.put)
            for number in range(3)
        ]
        jobs = [remote(order) for order in orders]
        jobs[1].kill()
        codes = {ended.attempt: ended.code for ended in (ends.get(timeout=60) for _ in range(3))}
    assert (batches, codes) == ([2], {0: 0, 1: -signal.SIGKILL, 2: 0})


@pytest.mark.slow
def test_a_job_that_its_engine_lost_has_failed_and_says_why(tmp_path: Path) -> None:
    with started(tmp_path, "", loses=True) as (_, ended):
        assert ended().code == 1
    assert (tmp_path / "0/output.log").read_text() == "RuntimeError: the node is gone\n"


def test_the_keys_of_a_launcher_are_those_of_its_class_and_others_are_refused_together() -> None:
    for launcher in ENGINES:
        kind = ENGINES[launcher]
        assert plugin._KEYS[launcher] == {field.name: getattr(kind(), field.name) for field in fields(kind)}
    problems = "".join(refused(ENGINES["submitit_slurm"].of, {"node": 1, "nodes": 0, "partition": 3}))
    assert "Did you mean hydra.launcher.nodes?" in problems
    assert "hydra.launcher.nodes=0: must be at least 1" in problems
    assert "hydra.launcher.partition=3: must be text" in problems


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher, extra in (("ray", "ray"), ("spark", "spark"), ("submitit_local", "slurm")):
        monkeypatch.setattr(kind := ENGINES[launcher], "packages", ("no_such_package",))
        assert install_command(extra, "") in refused(kind().require)[0]
    monkeypatch.setattr(kind := ENGINES["submitit_slurm"], "packages", ())
    monkeypatch.setenv("PATH", "")
    assert "no sbatch here" in refused(kind().require)[0]


@pytest.mark.slow
def test_a_cluster_with_a_launcher_is_handed_a_single_run_too_and_its_job_trains() -> None:
    run = trainkit.compose(["cluster=slurm", "hydra.launcher.partition=gpu", "sweep.retries=1"])
    assert (run.is_sweep, run.launcher) == (True, "submitit_slurm")
    assert "hands runs to the launcher submitit_slurm" in refused(trainkit.train, run)[0]
    command = ComposedConfigLoader(Composer()).command(["cluster=slurm", "hydra.launcher.partition=gpu"], Path("job"))
    assert command[3:] == ("--no-project", "cluster=slurm", "hydra.mode=RUN", "hydra.run.dir=job")
    assert not trainkit.compose(command[4:6]).is_sweep


def slots_of(num_gpus: int = 0, num_cores: int = 8, environ: Mapping[str, str] | None = None, **settings: Any) -> Slots:
    return Slots.of(Settings(**settings), num_gpus=num_gpus, num_cores=num_cores, environ=environ or {})


@pytest.mark.parametrize(
    ("settings", "count", "threads"),
    [
        ({}, 8, "1"),
        ({"environ": {"OMP_NUM_THREADS": "4"}}, 2, "4"),
        ({"slots": 2}, 2, "4"),
        ({"slots": 16}, 16, "1"),
        ({"slots": 2, "environ": {"OMP_NUM_THREADS": "1"}}, 2, "1"),
        ({"num_gpus": 4}, 4, "2"),
        ({"num_gpus": 4, "jobs_per_device": 2}, 4, "1"),
    ],
)
def test_slots_are_the_gpus_or_shares_of_the_cores(settings: dict[str, Any], count: int, threads: str) -> None:
    slots = slots_of(**settings)
    assert (slots.count, slots.threads["OMP_NUM_THREADS"]) == (count, threads)


def test_a_job_sees_its_own_gpus_by_the_names_they_were_given_and_its_share_of_their_memory() -> None:
    slots = slots_of(num_gpus=3, environ={"CUDA_VISIBLE_DEVICES": "4,GPU-ab,7"})
    first = slots.take(2)
    assert first.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-ab"
    assert slots.take(1).environ["CUDA_VISIBLE_DEVICES"] == "7"
    slots.give_back(first)
    assert slots.free == 2
    assert "TRAINKIT_MEMORY_SHARE" not in first.environ
    mig = slots_of(num_gpus=2, environ={"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"})
    assert [mig.take(1).environ["CUDA_VISIBLE_DEVICES"] for _ in range(2)] == ["MIG-4e5f", "MIG-77aa"]
    assert "CUDA_VISIBLE_DEVICES" not in slots_of().take(1).environ


def test_jobs_that_share_gpus_are_spread_over_them() -> None:
    slots = slots_of(num_gpus=2, jobs_per_device=2)
    leases = [slots.take(1) for _ in range(3)]
    assert [lease.devices for lease in leases] == [(0,), (1,), (0,)]
    assert (slots.in_use, slots.total, slots.free) == (3, 4, 1)
    assert leases[0].environ["TRAINKIT_MEMORY_SHARE"] == "0.5"


def test_what_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 GPUs"):
        slots_of(num_gpus=2, slots=4)
    with pytest.raises(ConfigError, match="no GPU here to share"):
        slots_of(jobs_per_device=2)
    assert slots_of(slots=2).problems("seed=1", 2) == []
    (problem,) = slots_of(slots=2).problems("strategy=mirrored", 4)
    assert "strategy=mirrored takes 4 slots" in str(problem)


def test_a_device_that_a_job_does_not_see_is_a_problem_before_it_starts() -> None:
    from trainkit.strategies.one_device import OneDevice

    def problems_of(device: str) -> list[Problem]:
        return numbering_problems(OneDevice(device=device), num_gpus=2, job_gpus=1)

    (problem,) = problems_of("cuda:1")
    assert "no such GPU: this host has 1, counted from 0. A job of a sweep sees only its own" in str(problem)
    assert problems_of("cuda:0") == problems_of("cuda:7") == []


def test_never_more_than_the_slots_are_in_use(tmp_path: Path) -> None:
    clock = "import sys, time; print(time.time(), flush=True); time.sleep(0.15); print(time.time(), flush=True)"
    widths = [1, 2, 1, 1, 2, 1, 3]
    jobs = [job(tmp_path, number, clock, slots=width) for number, width in enumerate(widths)]
    run(sweep_in(tmp_path, slots=Slots(count=3)), *jobs)
    spans = [tuple(map(float, (job.folder / "output.log").read_text().split())) for job in jobs]
    used = [
        sum(width for width, (begin, end) in zip(widths, spans, strict=True) if begin <= moment < end)
        for moment, _ in spans
    ]
    assert max(used) == 3
    assert time.time() > max(end for _, end in spans)


def test_a_job_takes_the_devices_of_its_strategy() -> None:
    from trainkit.config.targets.build import build

    expected = {
        "OneDevice": (1, 1), "Mirrored": (2, 8), "CentralStorage": (2, 8), "DeviceMap": (1, 8),
    }  # fmt: skip
    for name, counts in expected.items():
        strategy = build({"_target_": f"trainkit.strategies.{name}"})
        assert (strategy.num_slots(0), strategy.num_slots(8)) == counts, name


def test_a_process_takes_its_part_of_the_share_of_each_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    workers = [Task(role="worker", index=rank, rank=rank, device="cuda:0") for rank in range(2)]
    central = Task(role="worker", index=0, rank=0, computes_on=("cuda:0", "cuda:1"))
    for task, tasks, share in ((workers[0], workers, 0.5), (central, [central], 0.25), (workers[0], workers, 1.0)):
        limit_memory(task, tasks, share)
    assert sorted(limits) == [(0.25, "cuda:0"), (0.25, "cuda:0"), (0.25, "cuda:1")]


@pytest.mark.parametrize(
    ("host_bytes", "rule"), [(10**10, None), (10**9, "Use 2 or less"), (10**8, "Not even one fits")]
)
def test_jobs_that_cannot_share_the_memory_of_the_host_are_refused(host_bytes: int, rule: str | None) -> None:
    plan = make_plan(compose(["recipe=digits"]).cfg, num_gpus=0)
    problems = crowding_problems(plan, meta_model(plan.cfg), jobs=3, jobs_per_device=1, host_bytes=host_bytes)
    assert [problem.key for problem in problems] == ([] if rule is None else ["sweep.slots"])
    assert rule is None or rule in problems[0].rule
