"""A picture that fails to be drawn, or a learning rate that the plan shows wrong, is caught here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.cli import main
from trainkit.report.plots import draw_bench, draw_loss, draw_scale


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_pictures_of_runs_and_measurements_are_drawn_with_any_text_and_with_gaps(tmp_path: Path) -> None:
    lines: dict[str, list[tuple[float, float | None]]] = {
        "train/loss": [(1, 2.0), (2, None), (3, 0.1)],
        "val/$loss": [(3, 0.2)],
    }
    draw_loss(tmp_path / "plots/loss.png", title="digits $x", losses=lines)
    spread: dict[str, Any] = {"median": 2.0, "low": 1.0, "high": 3.0}
    choice = {"label": "a" * 60, "samples_per_s": spread, "parts_s": {"forward": spread, "backward": spread}}
    draw_bench(tmp_path / "bench.png", title="t" * 200, choices=[choice, choice])
    predictions = [
        {"replicas": count, "speedup": {"middle": count * 0.9, "low": 0.8 * count, "high": 1.0 * count}, "step_s": 0.1,
         "efficiency": 0.9, "cost_per_million": None}
        for count in (1, 2, 4)
    ]  # fmt: skip
    checks = [{"replicas": 2, "measured_s": 0.05}]
    draw_scale(tmp_path / "scale.png", title="scale", predictions=predictions, checks=checks, knee=None)
    assert all(map(is_png, (tmp_path / "plots/loss.png", tmp_path / "bench.png", tmp_path / "scale.png")))


def test_plan_shows_the_learning_rate_and_draws_it_as_png_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe=digits", "--rate-png", str(tmp_path / "rates.png")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  rate   ")]
    shown = line.split()[1]
    assert len(shown) == 60
    assert shown[0] == shown[-1] != shown[2]
    assert is_png(tmp_path / "rates.png")
    assert main(["plan", "recipe=digits", "--rate-png", "rates.pdf"]) == 2
    assert "--rate-png=rates.pdf: must end in .png" in capsys.readouterr().err
