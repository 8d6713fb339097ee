from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.report.drawing import Drawing, draw, lr_request, metrics_request, sweep_request


def test_a_plot_is_drawn_beside_the_training(tmp_path: Path) -> None:
    drawing = Drawing(lr_request(tmp_path / "plots/lr.png", title="digits", rates={"": [(0, 0.0), (10, 0.1)]}))
    assert drawing.wait(60) == ""
    assert not drawing.running
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["lr.png"]


def test_a_plot_that_fails_says_why(tmp_path: Path) -> None:
    drawing = Drawing(metrics_request(tmp_path, title="digits", metrics=tmp_path / "absent.jsonl", modes={}))
    absent = f"{tmp_path}/absent.jsonl cannot be read: it does not exist."
    assert drawing.wait(60) == f"trainkit.errors.AbsentFileError: {absent}"


def test_a_plot_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    drawing = Drawing(lr_request(tmp_path / "lr.png", title="digits", rates={"": [(0, 0.0)]}))
    assert drawing.wait(0.001) == "not drawn within 0.001 s"
    assert list(tmp_path.iterdir()) == []


def test_the_requests_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    draw(metrics_request(tmp_path, title="digits", metrics=tmp_path / "metrics.jsonl", modes={}))
    jobs = [{"label": "seed=0", "value": 1.0, "status": "finished", "settings": {"seed": "0"}}]
    draw(sweep_request(tmp_path / "leaderboard.png", title="sweep", metric="val/loss", mode="min", jobs=jobs))
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["leaderboard.png", "loss.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_plot_does_not_outlive_its_run() -> None:
    # Started by another process than the one it was meant for: that one is gone, there is nothing to draw.
    done = subprocess.run(
        [sys.executable, "-m", "trainkit.report.drawing", "1"], input=b"", capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_requesting_process_imports_nothing_heavy() -> None:
    heavy = "print([name for name in ('matplotlib', 'rich', 'torch') if name in sys.modules])"
    modules = "trainkit.report.drawing, trainkit.report.events"
    code = f"import sys, {modules}; {heavy}; import trainkit.callbacks.progress; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['torch']\n"
