"""A replica that real Ray or Spark loses and that changes a bit of the run, or leaves a folder, is caught here."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.results import sha256
from tests.support.verdicts import plain

OVERRIDES = (
    "recipe=digits", "steps=12", "numerics.reproducible=true", "batch.global_size=64", "batch.micro_size=16",
    "checkpoint.every_steps=4", "model.dropout=0.1", "callbacks=[]", "logger=[]", "quiet=true",
)  # fmt: skip
KILL = "rank=1,step=7,phase=backward,attempt=0,action=kill"

# Ray starts 16 processes one after the other, and each imports for seconds of a core that others use, too.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def needs(*packages: str) -> None:
    absent = [name for name in packages if importlib.util.find_spec(name) is None and shutil.which(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}, which is not installed")


def train(folder: str, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = quick.command(*OVERRIDES, f"hydra.run.dir={folder}", *more)
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


def loses_a_replica_and_ends_in_the_same_bits(engine: str, name: str) -> None:
    subprocess.run(quick.command(*OVERRIDES, "hydra.run.dir=alone"), check=True)
    done = train("run", f"cluster={engine}", "strategy=mirrored", "strategy.replicas=2", TRAINKIT_FAIL=KILL)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was ended by SIGKILL in step 7 (backward)." in plain(done.stdout)
    assert f" {name} starts all again." in plain(done.stdout)
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == ["alone", "run"]
    assert not (Path("run") / ".engine").exists()
    assert sha256("run") == sha256("alone")


def test_ray(cwd: Path) -> None:
    needs("ray", "pyarrow")
    loses_a_replica_and_ends_in_the_same_bits("ray", "Ray")


def test_spark(cwd: Path) -> None:
    needs("pyspark", "pandas", "pyarrow", "java")
    loses_a_replica_and_ends_in_the_same_bits("spark", "Spark")
