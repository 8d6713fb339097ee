import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.present import present
from trainkit.trainer.checkpoint import Retention, SavePolicy, list_complete, newest_valid, save


def save_all(
    root: Path, metrics: Sequence[float | None], retention: Retention
) -> tuple[list[int], dict[str, str | None]]:
    for step, metric in enumerate(metrics, start=1):
        save(root, step=step, tensors={}, meta={}, metric=metric, policy=SavePolicy(retention=retention))
    names = json.loads((root / "index.json").read_text())
    return [entry.step for entry in list_complete(root)], names


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    retention = Retention(keep_last=2, keep_best=1, mode="max")
    steps, names = save_all(tmp_path, [0.1, 0.9, 0.3, 0.2, 0.4], retention)
    assert steps == [5, 4, 2]
    assert names == {"last": "step_00000005", "best": "step_00000002"}


def test_small_is_good_in_mode_min(tmp_path: Path) -> None:
    steps, names = save_all(tmp_path, [3.0, 1.0, 2.0], Retention(keep_last=1, keep_best=1, mode="min"))
    assert steps == [3, 2]
    assert names["best"] == "step_00000002"


def test_of_equals_the_earlier_is_best(tmp_path: Path) -> None:
    _, names = save_all(tmp_path, [0.5, 0.5, 0.5], Retention(keep_last=3, mode="max"))
    assert names["best"] == "step_00000001"


def test_nan_and_absence_are_never_best(tmp_path: Path) -> None:
    steps, names = save_all(tmp_path, [None, 1.0, math.nan, None], Retention(keep_last=1, keep_best=3, mode="min"))
    assert steps == [4, 2]
    assert names == {"last": "step_00000004", "best": "step_00000002"}


def test_without_metrics_there_is_no_best(tmp_path: Path) -> None:
    steps, names = save_all(tmp_path, [None, None, None], Retention(keep_last=2))
    assert steps == [3, 2]
    assert names == {"last": "step_00000003", "best": None}


def test_no_best_is_kept_when_not_asked(tmp_path: Path) -> None:
    steps, _ = save_all(tmp_path, [9.0, 1.0, 1.0], Retention(keep_last=1, keep_best=0, mode="max"))
    assert steps == [3]


def test_the_last_checkpoint_cannot_be_given_up() -> None:
    with pytest.raises(ValueError, match="keep_last must be 1 or more"):
        Retention(keep_last=0)


def test_pruning_leaves_no_folder_behind(tmp_path: Path) -> None:
    save_all(tmp_path, [None] * 4, Retention(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000004"]


def test_what_was_passed_over_for_damage_does_not_push_out_what_is_whole(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(
            tmp_path,
            step=step,
            tensors={"param/w": torch.ones(9)},
            meta={},
            policy=SavePolicy(retention=Retention(keep_last=3)),
        )
    flip_last_byte(tmp_path / "step_00000300" / "rank_00000.safetensors")  # its size is right: only loading notices
    (tmp_path / "step_00000200" / "manifest.json").unlink()
    assert present(newest_valid(tmp_path, print)).checkpoint.step == 100
    save(tmp_path, step=150, tensors={}, meta={}, policy=SavePolicy(retention=Retention(keep_last=1)))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "index.json",
        "step_00000150",
        "step_00000200",  # without its manifest nobody knows who wrote it
        "step_00000300.aside",
    ]
    assert json.loads((tmp_path / "index.json").read_text())["last"] == "step_00000150"


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
