from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.report.sweep_plot import Axis, draw_sweep


def job(value: float | None, status: str = "finished", **settings: str) -> dict[str, Any]:
    return {"label": "a job", "value": value, "status": status, "settings": settings}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2", "9"], "linear"),
        (["0.001", "0.1"], "log"),
        (["0", "100"], "linear"),
        (["1", "auto"], "names"),
        (["1", "nan"], "names"),
    ],
)
def test_an_axis_is_what_its_values_are(values: list[str], kind: str) -> None:
    assert Axis.of("key", values).kind == kind


def test_few_values_are_all_written_and_many_at_even_places() -> None:
    few, many = ["1", "2", "8"], [str(number) for number in range(101)]
    assert Axis.of("key", few).ticks(few) == [(0.0, "1"), (1 / 7, "2"), (1.0, "8")]
    assert [text for _, text in Axis.of("key", many).ticks(many)] == ["0", "25", "50", "75", "100"]


@pytest.mark.parametrize(
    "jobs",
    [
        [job(0.5)],
        [job(0.5, seed="1"), job(0.5, seed="2")],
        [job(0.9, lr="0.1", model="mlp"), job(0.8, "pruned", lr="0.01", model="gpt"), job(None, "failed", lr="1")],
        [job(None, "failed", lr="0.1"), job(None, "failed", lr="0.2")],
        [job(0.1, **{f"key{place}": str(number) for place in range(12)}) for number in range(3)],
    ],
)
def test_odd_sweeps_are_drawn_too(tmp_path: Path, jobs: list[dict[str, Any]]) -> None:
    draw_sweep(tmp_path / "leaderboard.png", title="sweep", metric="val/loss", mode="min", jobs=jobs)
    assert (tmp_path / "leaderboard.png").read_bytes().startswith(b"\x89PNG")
