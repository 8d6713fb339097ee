"""What the plan refuses for lack of memory runs out of it, and what it lets pass trains."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/plan_limits.py"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory")
def test_four_trainings_run_out_of_less_memory_than_planned_and_fit_into_more() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--every", "8"], capture_output=True, text=True, check=False)
    counts = ast.literal_eval(done.stdout.splitlines()[-1])
    assert counts == {("refused", "runs out"): 4, ("fits", "trains"): 4}, done.stdout + done.stderr
