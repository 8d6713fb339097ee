"""What a process does with the memory that a step on a CPU frees."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.cluster.host import keep_freed_memory
from trainkit.strategies.core import synchronous

STEPS = """
import resource
from trainkit.cluster.host import keep_freed_memory

def step():
    kept = [b"x" * 2**24 for _ in range(6)]

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
print(new_pages())
print(keep_freed_memory())
step()
print(new_pages())
"""
"""Steps that allocate and free 96 MiB each, in a process whose heap holds nothing else."""


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_a_second_step_finds_the_memory_of_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True)
    before, kept, after = done.stdout.split()
    assert kept == "True"
    assert int(after) < 100 < int(before)


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
