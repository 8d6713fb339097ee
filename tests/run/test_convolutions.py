"""Convolutions whose gradient torch computes wrongly in bfloat16 on a CPU are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit import api
from trainkit.errors import ConfigError
from trainkit.run.planning import convolutions

SMALL = ("recipe=null", "model=resnet", "model.depth=18", "model.num_classes=10", "data=synthetic",
         "data.num_classes=10", "data.num_samples=8", "data.val_samples=1", "objective=classification",
         "batch.global_size=4", "steps=1", "eval.every_epochs=null", "logger=[]", "callbacks=[]",
         "quiet=true")  # fmt: skip


@pytest.mark.parametrize("shape", ["[3,16,16]", "[3,32,1]"])
def test_images_that_become_smaller_than_a_stride_are_refused_in_bfloat16(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: True)
    composition = api.compose([*SMALL, f"data.shape={shape}", "precision=bf16_mixed"])
    with pytest.raises(ConfigError, match=r"precision=bf16_mixed: has a wrong gradient on this CPU in \w+\.\d"):
        api.train(composition, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("shape", "precision", "has_the_kernel"),
    [("[3,32,32]", "bf16_mixed", True), ("[3,16,16]", "fp32", True), ("[3,16,16]", "bf16_mixed", False)],
)
def test_other_images_precisions_and_processors_train(
    shape: str, precision: str, has_the_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: has_the_kernel)
    composition = api.compose([*SMALL, f"data.shape={shape}", f"precision={precision}"])
    assert api.train(composition, run_dir=tmp_path / "run")["status"] == "finished"
