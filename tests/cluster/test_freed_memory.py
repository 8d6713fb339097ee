"""What a process does with the memory that a step on a CPU frees."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from trainkit.cli import main
from trainkit.cluster.host import keep_freed_memory, return_freed_memory
from trainkit.strategies.core import synchronous

MIB = 2**20


def new_pages() -> int:
    """Return the page faults of a step that allocates and frees 96 MiB, after one that did the same."""

    def step() -> None:
        kept = [torch.ones(16 * MIB // 4) for _ in range(6)]
        del kept

    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_a_second_step_finds_the_memory_of_the_first() -> None:
    assert return_freed_memory()  # as a training of fsdp in this process may have done
    assert keep_freed_memory()
    assert new_pages() < MIB // resource.getpagesize()


@pytest.mark.usefixtures("unset")
def test_the_users_own_setting_of_malloc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()


def test_a_training_on_a_cpu_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(synchronous, "keep_freed_memory", lambda: told.append(True))
    run = ["recipe=digits", "steps=1", "callbacks=[]", "quiet=true", "eval.every_epochs=null"]
    assert main([*run, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert told == [True]
