"""The script for the first contact with a GPU runs on a CPU, and every row of it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu/first_contact.py"


def first_contact(out: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run parts of the script on the CPU."""
    command = [sys.executable, str(SCRIPT), *parts, "--small", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_holds_on_the_cpu(tmp_path: Path) -> None:
    done = first_contact(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "first_contact.md").read_text()
    for part in ("tests", "prove", "alone", "pair", "failures", "mlp", "resnet", "gpt"):
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert rows
        assert f"## {part}\n" in page


@pytest.mark.long
def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = first_contact(tmp_path / "out", "alnoe")
    assert (done.returncode, done.stderr.splitlines()[-1].partition("error: ")[2]) == (
        2, "no part alnoe; there are tests, prove, alone, pair, failures, mlp, resnet, gpt",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()
