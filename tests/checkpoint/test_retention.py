"""A pruning that deletes the best checkpoint, or takes a NaN or a later equal for the best, is caught here alone."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.present import present
from tests.support.saving import save
from trainkit.trainer.checkpoint.tensors import newest_valid
from trainkit.trainer.manifest import Retention


@pytest.mark.parametrize(
    ("metrics", "retention", "kept", "best"),
    [
        ([0.1, 0.9, 0.3, 0.2, 0.4], Retention(keep_last=2, keep_best=1, mode="max"), [2, 4, 5], 2),
        ([0.1, 0.9, 0.3, 0.8, 0.4], Retention(keep_last=1, keep_best=2, mode="max"), [2, 4, 5], 2),
        ([3.0, 1.0, 2.0], Retention(keep_last=1, keep_best=1, mode="min"), [2, 3], 2),
        ([0.5, 0.5, 0.5], Retention(keep_last=3, mode="max"), [1, 2, 3], 1),  # of equals the earlier is best
        ([None, 1.0, math.nan, None], Retention(keep_last=1, keep_best=3, mode="min"), [2, 4], 2),
        ([None, None, None], Retention(keep_last=2), [2, 3], None),
        ([9.0, 1.0, 1.0], Retention(keep_last=1, keep_best=0, mode="max"), [3], 3),
        ([9.0, 1.0], Retention(mode="max"), [1, 2], 1),
    ],
)
def test_the_last_and_the_best_stay_and_no_other_folder(
    tmp_path: Path, metrics: Sequence[float | None], retention: Retention, kept: list[int], best: int | None
) -> None:
    for step, metric in enumerate(metrics, start=1):
        save(tmp_path, step=step, tensors={}, meta={}, metric=metric, retention=retention)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["index.json", *(f"step_0000000{step}" for step in kept)]
    named = None if best is None else f"step_0000000{best}"
    assert json.loads((tmp_path / "index.json").read_text()) == {"last": folders[-1], "best": named}


def test_the_last_checkpoint_cannot_be_given_up() -> None:
    with pytest.raises(ValueError, match="keep_last must be 1 or more"):
        Retention(keep_last=0)


def test_what_was_passed_over_for_damage_does_not_push_out_what_is_whole(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step=step, tensors={"param/w": torch.ones(9)}, meta={}, retention=Retention(keep_last=3))
    damaged = tmp_path / "step_00000300" / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")  # its size is right: only loading notices
    (tmp_path / "step_00000200" / "manifest.json").unlink()
    assert present(newest_valid(tmp_path, print)).checkpoint.step == 100
    save(tmp_path, step=150, tensors={}, meta={}, retention=Retention(keep_last=1))
    # without its manifest nobody knows who wrote the one of step 200
    found = [path.name for path in sorted(tmp_path.iterdir())]
    assert found == ["index.json", "step_00000150", "step_00000200", "step_00000300.aside"]
    assert json.loads((tmp_path / "index.json").read_text())["last"] == "step_00000150"
