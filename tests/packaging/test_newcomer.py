"""An own package that trains in a checkout but not beside an installed wheel is caught here alone."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.results import result_of

PROJECT = Path(__file__).parent / "newcomer"
OWN = ("--config-dir", "my_conf", "--allow-package", "newcomer")


@pytest.fixture
def trainkit(
    installed: Path, cwd: Path, clean_environ: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed trainkit in the user's project."""
    shutil.copytree(PROJECT, cwd, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = quick.command(*arguments, python=installed / "python")
        return subprocess.run(
            command, cwd=cwd, env=clean_environ, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def test_a_users_strategy_trains_their_model_on_their_data_to_the_same_weights(
    trainkit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for strategy in ("one_device", "pair"):
        settings = (f"strategy={strategy}", "numerics.reproducible=true", f"hydra.run.dir={strategy}")
        done = trainkit(*OWN, "recipe=sides", *settings)
        assert done.returncode == 0, done.stderr
        assert (result_of(strategy)["status"], result_of(strategy)["steps"]) == ("finished", 6)
        assert {"val/loss", "val/accuracy"} <= result_of(strategy)["metrics"].keys()
    assert result_of("pair")["weights_sha256"] == result_of("one_device")["weights_sha256"]


@pytest.mark.long
def test_prove_finds_a_users_mean_of_means(trainkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    wrong = trainkit("prove", *OWN, "recipe=sides", "strategy=wrong")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "first after step 1: param/layers.0.weight" in wrong.stdout
