from __future__ import annotations

import csv
import subprocess
from pathlib import Path

from tests.report.test_run_page import shown
from tests.support import quick


def test_a_sweep_from_the_command_line(cwd: Path) -> None:
    done = subprocess.run(
        quick.command("-m", "recipe=null", "steps=12", "callbacks=[]", "logger=[]",
            "sweep.name=rates", "eval.metric=val/accuracy", "optimizer.lr=1e30,0.01"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    folder = cwd / "outputs/sweeps/rates"
    assert done.returncode == 1, done.stderr
    with (folder / "leaderboard.csv").open() as file:
        rows = [(row["job"], row["status"], row["optimizer.lr"], row["folder"]) for row in csv.DictReader(file)]
    assert rows == [("1", "finished", "0.01", "1"), ("0", "failed", "1e+30", "0")]
    lines = done.stdout.splitlines()
    assert "2 jobs, 1 failed, by val/accuracy (max)" in lines
    assert lines[-2:] == [
        "  page  outputs/sweeps/rates/report.html",
        "  leaderboard  outputs/sweeps/rates/leaderboard.md",
    ]
    assert [run["name"] for run in shown(folder / "report.html")["runs"]] == ["0", "1"]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"0", "1"}
    assert (folder / "leaderboard.png").exists()
