"""A user's own package beside an installed wheel: model, dataset, strategy and YAMLs, no fork, no registry."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import quick

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


def result(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found


def test_a_users_recipe_trains_their_model_on_their_data(
    trainkit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = trainkit(*OWN, "recipe=sides", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert (result("out")["status"], result("out")["steps"]) == ("finished", 6)
    assert {"val/loss", "val/accuracy"} <= result("out")["metrics"].keys()


def test_a_users_strategy_trains_the_same_weights(trainkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    for strategy in ("one_device", "pair"):
        done = trainkit(
            *OWN, "recipe=sides", f"strategy={strategy}", "numerics.reproducible=true", f"hydra.run.dir={strategy}"
        )
        assert done.returncode == 0, done.stderr
    assert result("pair")["weights_sha256"] == result("one_device")["weights_sha256"]


@pytest.mark.long
def test_a_users_recipe_and_groups_are_swept(trainkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = trainkit(
        *OWN, "-m", "recipe=sides", "model=curve,mlp", "model.in_features=1", "model.out_features=2",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(Path("sweep").glob("*/result.json"))) == 2
    assert Path("sweep", "leaderboard.md").is_file()


@pytest.mark.long
def test_prove_finds_a_users_mean_of_means(trainkit: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    wrong = trainkit("prove", *OWN, "recipe=sides", "strategy=wrong")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "first after step 1: param/layers.0.weight" in wrong.stdout


def test_a_bad_value_in_a_users_recipe_is_answered_with_file_and_line(
    trainkit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    recipe = Path("my_conf/recipe/sides.yaml")
    recipe.write_text(recipe.read_text().replace("epochs: 2", "epochs: two"))
    done = trainkit(*OWN, "recipe=sides")
    assert done.returncode == 2
    assert done.stderr == (
        "1 problem in the config\n  epochs=two: must be a number or null. (my_conf/recipe/sides.yaml:9)\n"
    )
    assert not Path("outputs").exists()


def test_a_package_that_was_not_named_is_refused_before_it_is_imported(
    trainkit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    Path("newcomer/__init__.py").write_text("raise SystemExit('imported')\n")
    done = trainkit("--config-dir", "my_conf", "recipe=sides")
    assert done.returncode == 2
    assert "--allow-package newcomer" in done.stderr
