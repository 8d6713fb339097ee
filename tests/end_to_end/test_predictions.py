"""Predictions that lose a row after kills, or keep all rows in memory, are caught here alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trainkit
from tests.support import quick
from trainkit.api.jobs import JobArguments, predict_to_file

ROOT = Path(__file__).parents[2]
CASES = ((1, 3), (1_797, 2), (100_003, 3))
"""Rows and ranks: fewer rows than ranks, a chunk for each rank, and many chunks."""
KILLS = 3
ROWS = ("data._target_=tests.trained.samples.Rows",)
MEMORY = """
import resource, sys
from pathlib import Path
from trainkit.api.jobs import JobArguments, predict_to_file
from trainkit.config.targets.allowed import allow_packages

with allow_packages(["tests"]):
    rows = ["data._target_=tests.trained.samples.Rows", f"data.num_rows={sys.argv[2]}"]
    overrides = [*rows, "predict.batch_size=256", "predict.outputs=classes"]
    asked = JobArguments(path=Path(sys.argv[1]), overrides=overrides, packages=["tests"])
    predict_to_file(asked, out=Path(sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on vectors of four numbers."""
    folder = tmp_path_factory.mktemp("run") / "vectors"
    cheap = ("data=synthetic", "data.shape=[4]", "data.num_samples=64", "model.in_features=4", "model.hidden=[8]")
    quiet = ("recipe=null", "epochs=1", "callbacks=[]", "logger=[]", "quiet=true")
    trainkit.train(trainkit.compose([*quiet, *cheap]), run_dir=folder)
    return folder


def start(run: Path, out: Path, *overrides: str, fail: str = "") -> int:
    arguments = ["predict", str(run), "--out", str(out), "--allow-package=tests", *ROWS, *overrides]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **({"TRAINKIT_FAIL": fail} if fail else {})}
    return subprocess.run(quick.command(*arguments), env=environ, capture_output=True, check=False).returncode


def failpoint(length: int, rank: int) -> str:
    if length < 1_000:
        return f"rank={rank},phase=load,action=kill"
    return f"rank={rank},phase=evaluate,step={6 if length > 10_000 else 3},action=kill"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("length", "ranks"), CASES)
def test_a_prediction_killed_again_and_again_has_every_id_in_order_and_the_same_bytes(
    run: Path, tmp_path: Path, length: int, ranks: int
) -> None:
    rows = f"data.num_rows={length}"
    predict_to_file(JobArguments(path=run, overrides=[*ROWS, rows], packages=["tests"]), out=tmp_path / "whole.npy")
    strategy = ["strategy=mirrored", f"strategy.replicas={ranks}"] if ranks > 1 else []
    out, kills = tmp_path / "out.npy", 0
    while kills < KILLS and start(run, out, rows, *strategy, fail=failpoint(length, kills % ranks)):
        assert not out.exists()
        kills += 1
    # with two or three ranks the 1,797 rows are two chunks: the ranks that live may compute the rest
    assert kills == KILLS or length == 1_797
    assert out.exists() or start(run, out, rows, *strategy) == 0
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert np.array_equal(np.load(tmp_path / "out.ids.npy"), np.arange(length))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.ids.npy", "out.npy", "whole.ids.npy", "whole.npy"]


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows(run: Path, tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(run), str(rows), str(tmp_path / f"{rows}.npy")]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert peak(1_000_000) - peak(10_000) < 16  # MiB: the places of the batches and the names of the parts
