"""The ways to have trainkit: the README's own commands, a checkout, an editable install."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist", "build")


def command(name: str) -> str:
    """A command of the README, to the letter."""
    pattern = rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```"
    found = re.search(pattern, (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readme_gives_one_line_to_train_and_one_to_test() -> None:
    start = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e "
    assert command("train") == f"{start}. && .venv/bin/python -m trainkit"
    assert command("tests") == f"{start}'.[test]' && .venv/bin/pytest"


def test_constraints_name_no_machine() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"(#.*)|[A-Za-z0-9_.-]+==[0-9a-z.]+", line)] == []
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]


def test_a_checkout_works_without_being_installed(tmp_path: Path, cwd: Path, clean_environ: dict[str, str]) -> None:
    home = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next((home / "lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run(
        [str(home / "bin" / "python"), "-m", "trainkit", "ls", "recipe"],
        cwd=cwd, env=clean_environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\ndigits " in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readmes_training_reaches_its_accuracy_from_a_clean_copy(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "clone", ignore=NOT_COPIED)
    shutil.rmtree(copy / "outputs", ignore_errors=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command("train")],
        cwd=copy, env=clean_environ | {"PIP_NO_COMPILE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (copy / "outputs" / "digits").glob("*/result.json")
    assert json.loads(found.read_text())["metrics"]["val/accuracy"] >= 0.97
    assert [path.name for path in (copy / "outputs").iterdir()] == ["digits"]
