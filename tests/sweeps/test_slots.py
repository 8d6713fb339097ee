"""Which devices a job gets: two jobs on one GPU, or more jobs at once than slots, are caught here alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sweeps.support import job, run, sweep_in
from trainkit.cluster.tasks import Task
from trainkit.config.compose import compose
from trainkit.config.sections import SweepConfig as Settings
from trainkit.errors import ConfigError, Problem
from trainkit.run.estimates.this_machine import crowding_problems
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import make_plan
from trainkit.run.task import limit_memory
from trainkit.sweeps.loop.slots import Slots, numbering_problems


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
    taken = [slots.take(1) for _ in range(3)]
    assert [one.places for one in taken] == [(0,), (1,), (0,)]
    assert (slots.in_use, slots.total, slots.free) == (3, 4, 1)
    assert taken[0].environ["TRAINKIT_MEMORY_SHARE"] == "0.5"


def test_what_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 GPUs"):
        slots_of(num_gpus=2, slots=4)
    with pytest.raises(ConfigError, match="no GPU here to share"):
        slots_of(jobs_per_device=2)
    (problem,) = slots_of(slots=2).problems([("strategy=mirrored", 4), ("seed=1", 2)])
    assert "strategy=mirrored takes 4 slots" in str(problem)


def test_a_device_that_a_job_does_not_see_is_a_problem_before_it_starts() -> None:
    from trainkit.strategies.base import PlanContext
    from trainkit.strategies.one_device import OneDevice

    def found(device: str) -> list[Problem]:
        strategy = OneDevice(device=device)
        return numbering_problems(lambda gpus: strategy.validate(PlanContext(num_gpus=gpus)), there=2, own=1)

    (problem,) = found("cuda:1")
    assert "no such GPU: this host has 1, counted from 0. A job of a sweep sees only its own" in str(problem)
    assert found("cuda:0") == found("cuda:7") == []


def test_never_more_than_the_slots_are_in_use(tmp_path: Path) -> None:
    clock = "import sys, time; print(time.time(), flush=True); time.sleep(0.15); print(time.time(), flush=True)"
    widths = [1, 2, 1, 1, 2, 1, 3]
    jobs = [job(tmp_path, number, clock, slots=width) for number, width in enumerate(widths)]
    run(sweep_in(tmp_path, slots=Slots(count=3)), *jobs)
    spans = [tuple(map(float, (one.folder / "output.log").read_text().split())) for one in jobs]
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
    both = [Task(role="worker", index=rank, rank=rank, device="cuda:0") for rank in range(2)]
    central = Task(role="worker", index=0, rank=0, computes_on=("cuda:0", "cuda:1"))
    for task, tasks, share in ((both[0], both, 0.5), (central, [central], 0.25), (both[0], both, 1.0)):
        limit_memory(task, tasks, share)
    assert sorted(limits) == [(0.25, "cuda:0"), (0.25, "cuda:0"), (0.25, "cuda:1")]


@pytest.mark.parametrize(
    ("host_bytes", "rule"), [(10**10, None), (10**9, "Use 2 or less"), (10**8, "Not even one fits")]
)
def test_jobs_that_cannot_share_the_memory_of_the_host_are_refused(host_bytes: int, rule: str | None) -> None:
    plan = make_plan(compose(["recipe=digits"]).cfg, num_gpus=0)
    found = crowding_problems(plan, meta_model(plan), jobs=3, jobs_per_device=1, host_bytes=host_bytes)
    assert [problem.key for problem in found] == ([] if rule is None else ["sweep.slots"])
    assert rule is None or rule in found[0].rule
