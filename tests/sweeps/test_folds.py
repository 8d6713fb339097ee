from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweeps.test_leaderboard import made
from trainkit.sweeps.results.leaderboard import Leaderboard, collect

RATES = ("0.1", "0.2")


def folded(root: Path, accuracies: Sequence[float | None], codes: None = None) -> Leaderboard:
    """A sweep over two rates, three folds each."""
    lines = [
        ("epochs=1", f"optimizer.lr={rate}", "cv.folds=3", f"cv.fold={fold}") for rate in RATES for fold in (0, 1, 2)
    ]
    rows = []
    for number, (line, accuracy) in enumerate(zip(lines, accuracies, strict=True)):
        if accuracy is not None:
            made(root, str(number), accuracy=accuracy, seconds=2.0)
        code = 0 if accuracy is not None else 1
        rows.append({"job": str(number), "folder": str(number), "overrides": line, "exit_code": code})
    (root / "sweep.json").write_text(json.dumps({"jobs": rows}))
    return collect(root)


def test_points_are_ranked_by_the_mean_over_their_folds(tmp_path: Path) -> None:
    board = folded(tmp_path, [0.5, 0.6, 0.7, 0.95, 0.4, 0.6])
    best, other = board.entries
    assert (best.job, best.overrides, best.status, best.seconds) == ("3-5", ("optimizer.lr=0.2",), "finished", 6.0)
    assert board.value(best) == pytest.approx(0.65)
    assert best.spread["val/accuracy"] == pytest.approx(math.sqrt((0.3**2 + 0.25**2 + 0.05**2) / 2))
    assert board.value(other) == pytest.approx(0.6)
    assert board.lines()[1].split("  ")[3] == "0.65 ± 0.2784"


def test_the_table_for_programs_has_the_spread_beside_the_mean(tmp_path: Path) -> None:
    head, first, _ = folded(tmp_path, [0.5, 0.5, 0.5, 0.25, 0.5, 0.75]).csv(base=tmp_path).splitlines()
    assert head == "rank,job,status,val/accuracy,val/accuracy spread,optimizer.lr,steps,seconds,folder"
    assert first == "1,0-2,finished,0.5,0.0,0.1,,6.0,0"


def test_a_point_that_lacks_a_fold_is_not_compared(tmp_path: Path) -> None:
    board = folded(tmp_path, [0.1, 0.1, 0.1, 0.9, None, 0.9])
    assert [(entry.job, entry.status, board.value(entry)) for entry in board.entries] == [
        ("0-2", "finished", pytest.approx(0.1)),
        ("3-5", "2 of 3 folds, exit 1", None),
    ]
