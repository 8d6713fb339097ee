from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
from tests.support.present import present

RECIPES = sorted(path.parent.name for path in (Path(__file__).parents[2] / "recipes").glob("*/recipe.yaml"))
ELSEWHERE = {"resnet50_imagenet": ["data=synthetic", "data.shape=[3,32,32]", "data.num_classes=1000"]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_opens_with_its_command(recipe: str) -> None:
    folder = Path(__file__).parents[2] / "recipes" / recipe

    cfg = trainkit.compose([f"recipe={recipe}", *ELSEWHERE.get(recipe, [])]).cfg

    assert cfg.recipe == recipe
    assert (folder / "recipe.yaml").read_text().startswith(f"# python -m trainkit recipe={recipe}")
    assert f"python -m trainkit recipe={recipe}" in (folder / "README.md").read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_with_dropout_or_batch_statistics_pins_its_shard(recipe: str) -> None:
    cfg = trainkit.compose([f"recipe={recipe}", *ELSEWHERE.get(recipe, [])]).cfg
    couples = cfg.model["_target_"].endswith(("ConvNet", "ResNet")) or cfg.model.get("dropout", 0) > 0

    assert cfg.batch.micro_size is not None or not couples


def test_goyals_milestones_are_epochs_30_60_and_80() -> None:
    cfg = trainkit.compose(["recipe=resnet50_imagenet", *ELSEWHERE["resnet50_imagenet"]]).cfg

    after_warmup = present(cfg.epochs) - present(cfg.warmup.epochs)

    assert [round(5 + share * after_warmup, 2) for share in cfg.schedule["milestones"]] == [30, 60, 80]
    assert (cfg.lr_scaling.reference_batch, cfg.optimizer["lr"], cfg.optimizer["nesterov"]) == (256, 0.1, True)
