"""`trainkit prove` names the rule that a planted fault breaks, and names none where nothing is planted."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mutants.planting import Mutant, copy_sources, plant
from tests.support import quick

LISTED: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "named.yaml").read_text())


def mutant_of(name: str) -> Mutant:
    entry = {key: value for key, value in LISTED[name].items() if key not in ("arguments", "named")}
    return Mutant(name=name, killers=(), **entry)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("named"))


def prove(copy: Path, cwd: Path, arguments: list[str]) -> tuple[int, str]:
    """Prove mirrored on two replicas with the sources of a copy; the exit code and what was printed."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    flags = ["--config-dir", str(copy / "tests/support/conf"), "--allow-package", "tests"]
    fixed = [*flags, "strategy=mirrored", "strategy.replicas=2", "--steps", "3", "--same-cut"]
    command = quick.command("prove", *fixed, *arguments, imports="torch")
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return result.returncode, result.stdout + result.stderr


def test_ten_faults_fit_the_source() -> None:
    for name in LISTED:
        assert mutant_of(name).undefined() == []
    assert len(LISTED) == 10


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LISTED)
def test_a_planted_fault_is_named(name: str, copy: Path, cwd: Path) -> None:
    with plant(mutant_of(name), copy):
        code, output = prove(copy, cwd, LISTED[name]["arguments"])
    explained = [line for line in output.splitlines() if "explained" in line]
    assert code == 1, output
    assert len(explained) == 1, output
    assert explained[0].strip().startswith(f"explained by: {LISTED[name]['named']}"), output


@pytest.mark.long
def test_nothing_is_named_where_nothing_is_planted(copy: Path, cwd: Path) -> None:
    for name in ("mean_of_means", "objective_keyed_without_the_shard"):  # by default, and what draws
        code, output = prove(copy, cwd, LISTED[name]["arguments"])
        assert code == 0, output
        assert "explained" not in output
