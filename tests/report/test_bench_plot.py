from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.report.measured_plots import draw_bench

PARTS = ("input", "forward", "backward", "exchange", "update", "rest")


def choice(label: str, speed: float) -> dict[str, Any]:
    spread = {"median": speed, "low": 0.9 * speed, "high": 1.2 * speed}
    part = {"median": 1e-3, "low": 1e-3, "high": 2e-3}
    return {"label": label, "samples_per_s": spread, "parts_s": dict.fromkeys(PARTS, part)}


@pytest.mark.parametrize("labels", [["one"], ["strategy=one_device", "x" * 200, "third"]])
def test_one_choice_and_long_labels_are_drawn(tmp_path: Path, labels: list[str]) -> None:
    draw_bench(tmp_path / "bench.png", title="trainkit bench", choices=[choice(one, 4e4) for one in labels])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
