"""Two processes of one host that would take the same GPU, or the same MIG instance, and a peak of another program,
are caught here alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import trainkit
from tests.launchers.launches import launch_of
from trainkit.cli import main
from trainkit.cluster.host import count_gpus, keep_freed_memory, peak_resident_bytes
from trainkit.cluster.tasks import Identity, Task
from trainkit.errors import ConfigError
from trainkit.run.planning.plan import make_plan
from trainkit.run.process.worker_group import worker_environ
from trainkit.run.rendezvous import join
from trainkit.run.rendezvous.barrier import ProcessBarrier
from trainkit.strategies.base import PlanContext
from trainkit.strategies.core import synchronous
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.mesh.strategy import Pipeline

TWO = {"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"}


@dataclass(frozen=True)
class FakeBarrier:
    """Stands for the barrier of processes that have seen these GPUs."""

    gpus: Sequence[str]

    def all_gather_object(self, value: dict[str, Any]) -> list[Any]:
        assert value["gpu"] in self.gpus
        return [{**value, "gpu": gpu} for gpu in self.gpus]


def test_a_process_that_sees_another_gpu_than_the_others_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def owns(gpu: str, *other_gpus: str, **launch: Any) -> bool:
        monkeypatch.setattr(join, "device_of_process", lambda: gpu)
        barrier = cast("ProcessBarrier", FakeBarrier([gpu, *other_gpus]))
        return join.share_host(barrier, launch_of(2, **launch)).has_own_gpu

    assert owns("GPU-1", "GPU-2")
    assert not owns("GPU-1", "GPU-1")
    assert not owns("", "GPU-2")
    assert not owns("", "GPU-2", num_local=1, num_hosts=2)  # the place on the host is the same
    context = PlanContext(launch=replace(launch_of(2, rank=1, local_rank=1), has_own_gpu=True), num_gpus=1)
    assert Mirrored().validate(context) == []
    assert Mirrored().tasks(context)[1].device == "cuda:0", "whatever its place on the host"


def test_each_rank_gets_one_mig_instance() -> None:
    for rank, name in enumerate(("MIG-4e5f", "MIG-77aa")):
        task = Task(role="worker", index=rank, rank=rank, device=f"cuda:{rank}")
        environ = worker_environ(TWO, Identity(task=task, num_ranks=2))
        assert (environ["CUDA_VISIBLE_DEVICES"], environ["TRAINKIT_DEVICE"]) == (name, "cuda:0")
    assert worker_environ(TWO, Identity.solo())["CUDA_VISIBLE_DEVICES"] == TWO["CUDA_VISIBLE_DEVICES"]


def test_mig_instances_are_counted_where_cuda_shows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", TWO["CUDA_VISIBLE_DEVICES"])
    for shown, counted in ((1, 2), (0, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda shown=shown: shown)
        assert count_gpus() == counted


def test_what_mig_instances_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", TWO["CUDA_VISIBLE_DEVICES"])
    for strategy in (["strategy=device_map"], ["strategy=one_device", "strategy.device=cuda:1"]):
        with pytest.raises(ConfigError, match="strategy: a process uses one MIG instance, and CUDA_VISIBLE_DEVICES"):
            make_plan(trainkit.compose(["recipe=digits", *strategy]).cfg, num_gpus=2)
    (problem,) = Pipeline(stages=2).validate(PlanContext(num_gpus=1))
    assert str(problem).startswith("strategy.stages=2: sends tensors between GPUs, which MIG instances cannot")


def test_cublas_and_malloc_are_set_before_a_device_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(synchronous, "keep_freed_memory", lambda: calls.append("memory is kept"))
    monkeypatch.setattr(synchronous, "use_device", lambda _: calls.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    run = ["recipe=digits", "steps=1", "numerics.reproducible=true", "callbacks=[]", "quiet=true"]
    assert main([*run, "eval.every_epochs=null", f"hydra.run.dir={tmp_path}/run"]) == 0
    assert sorted(map(str, calls)) == [":4096:8", "memory is kept"]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


STEPS = """
import resource
from trainkit.cluster.host import count_gpus, keep_freed_memory, peak_resident_bytes

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [b"x" * 2**24 for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

new_pages()
print(new_pages(), keep_freed_memory(), new_pages(), new_pages())
"""
"""Steps that allocate and free 96 MiB each, in a process whose heap holds nothing else."""


@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_a_second_step_finds_the_memory_of_the_first_unless_malloc_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True)
    before, is_kept, _, after = done.stdout.split()
    assert is_kept == "True"
    assert int(after) < 100 < int(before)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_process_is_not_that_of_the_program_which_started_it() -> None:
    memory = b"x" * 2**28
    code = "from trainkit.cluster.host import peak_resident_bytes as peak; print(peak())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < len(memory) < peak_resident_bytes()
