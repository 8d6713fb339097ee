"""A recipe that no longer composes, or whose numbers depend on how a step is cut, is caught here alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from tests.support.present import present

FOLDER = Path(__file__).parents[2] / "recipes"
IMAGENET = ["data=synthetic", "data.shape=[3,32,32]", "data.num_classes=1000"]


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in FOLDER.glob("*/recipe.yaml")))
def test_a_recipe_composes_and_pins_its_shard_if_dropout_or_batch_statistics_depend_on_it(recipe: str) -> None:
    cfg = trainkit.compose([f"recipe={recipe}", *(IMAGENET if recipe == "resnet50_imagenet" else [])]).cfg
    assert f"python -m trainkit recipe={recipe}" in (FOLDER / recipe / "README.md").read_text()
    couples = cfg.model["_target_"].endswith(("ConvNet", "ResNet")) or cfg.model.get("dropout", 0) > 0
    assert cfg.batch.micro_size is not None or not couples


def test_goyals_milestones_are_epochs_30_60_and_80() -> None:
    cfg = trainkit.compose(["recipe=resnet50_imagenet", *IMAGENET]).cfg
    after_warmup = present(cfg.epochs) - present(cfg.warmup.epochs)
    assert [round(5 + share * after_warmup, 2) for share in cfg.schedule["milestones"]] == [30, 60, 80]
    assert (cfg.lr_scaling.reference_batch, cfg.optimizer["lr"], cfg.optimizer["nesterov"]) == (256, 0.1, True)
