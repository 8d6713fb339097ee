import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.run.folder.run_folder import RunFolder

FAKE = Path(__file__).with_name("fake_worker.py")


def work(folder: RunFolder, **environ: str) -> subprocess.CompletedProcess[str]:
    folder.path.mkdir(exist_ok=True)
    command = [sys.executable, str(FAKE), str(folder.resolved)]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=30, check=False
    )


def test_a_worker_started_by_hand_is_a_run_of_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert work(folder, FAKE="steps=2").returncode == 0
    assert folder.read_result() == {"status": "finished", "attempt": 0, "restarts": []}


def test_a_worker_started_by_hand_prints_its_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    done = work(folder, FAKE="steps=4", FAKE_RAISE="0:DataError:no such file")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "trainkit.errors.DataError: no such file"


def test_a_bad_identity_is_a_config_error(tmp_path: Path) -> None:
    done = work(RunFolder(tmp_path / "run"), TRAINKIT_RANK="first")
    assert done.returncode == 2
    assert "TRAINKIT_RANK=first: must be a whole number, 0 or more. (environment)" in done.stderr


def test_a_worker_started_by_hand_that_is_not_the_chief_prints_its_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainkit.run.worker_main", str(tmp_path / "resolved.yaml")]
    place = {"TRAINKIT_RANK": "1", "TRAINKIT_RANKS": "2", "TRAINKIT_STORE": "127.0.0.1:1"}
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("worker:1, rank 1 of 2: its output stays in this terminal\n")
    assert done.returncode == 4, "there is no run"


def test_the_worker_says_how_it_is_called() -> None:
    command = [sys.executable, "-m", "trainkit.run.worker_main"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: python -m trainkit.run.worker_main RUN/resolved.yaml\n")


@pytest.mark.parametrize("module", ["torch", "hydra", "omegaconf"])
def test_the_shell_of_a_worker_imports_nothing_slow(module: str) -> None:
    code = f"import sys, trainkit.run.worker_main; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_a_worker_never_imports_hydra() -> None:
    code = "import sys, trainkit.run.runner; sys.exit(bool({'hydra', 'omegaconf'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
