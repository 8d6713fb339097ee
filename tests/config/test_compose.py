"""A value of a lower place that silently wins over one of a higher place is caught here alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.conftest import Write
from trainkit.config.compose import compose
from trainkit.config.composition import Composition
from trainkit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
# A training of the test
defaults:
  - override /model: mlp
  - override /optimizer: sgd
epochs: 7
batch:
  micro_size: 16
model:
  hidden: [32, 32]
optimizer:
  lr: 0.5
callbacks:
  plots: {every_s: 1.0}
"""


@pytest.fixture
def with_recipe(write_conf: Write) -> Callable[..., Composition]:
    folder = write_conf({"recipe/mine.yaml": RECIPE})

    def run(*arguments: str) -> Composition:
        return compose(["recipe=mine", *arguments], config_dirs=[folder])

    return run


def test_the_command_line_outranks_the_recipe_and_that_the_choice_and_that_the_defaults(
    with_recipe: Callable[..., Composition],
) -> None:
    values = with_recipe("optimizer.lr=0.25").values
    assert values["optimizer"]["lr"] == 0.25
    assert values["model"]["hidden"] == [32, 32]
    assert values["model"]["out_features"] == 10
    assert values["seed"] == 0


def test_the_origin_of_a_key_is_the_line_that_set_it(with_recipe: Callable[..., Composition], tmp_path: Path) -> None:
    composed = with_recipe("optimizer.lr=0.25")
    assert composed.origin("optimizer.lr").where == "command line"
    assert composed.origin("model.hidden").where == f"{tmp_path}/conf/recipe/mine.yaml:9"
    assert composed.origin("batch.micro_size").where == f"{tmp_path}/conf/recipe/mine.yaml:7"
    line = 1 + (ROOT / "conf/config.yaml").read_text().splitlines().index("seed: 0")
    assert composed.origin("seed").where.endswith(f"conf/config.yaml:{line}")
    assert composed.origin("model.dropout").where.endswith("conf/model/mlp.yaml:7")


def test_a_recipe_outranks_a_choice_whatever_the_order_of_the_defaults(write_conf: Write) -> None:
    folder = write_conf(
        {"recipe/mine.yaml": "seed: 5\n", "debug/fast.yaml": "# @package _global_\nseed: 9\nepochs: 2\n"}
    )
    values = compose(["recipe=mine", "+debug=fast"], config_dirs=[folder]).values
    assert (values["seed"], values["epochs"]) == (5, 2)


def test_a_swapped_choice_takes_along_what_the_recipe_set_in_its_group(with_recipe: Callable[..., Composition]) -> None:
    composed = with_recipe("optimizer=adamw")
    assert composed.values["optimizer"]["lr"] == 0.001
    assert composed.values["model"]["hidden"] == [32, 32]
    assert composed.notes == (
        "optimizer=adamw replaces sgd: the keys that the recipe set in optimizer are dropped with it (optimizer.lr)",
    )


def test_naming_the_recipes_own_choices_drops_nothing_that_is_still_chosen(
    with_recipe: Callable[..., Composition],
) -> None:
    composed = with_recipe("optimizer=sgd", "callbacks=[plots]")
    assert (composed.values["optimizer"]["lr"], composed.values["callbacks"]["plots"]["every_s"]) == (0.5, 1.0)
    assert composed.notes == ()
    assert "plots" not in with_recipe("callbacks=[progress]").values["callbacks"]


def test_a_recipe_may_start_from_another(write_conf: Write) -> None:
    recipes = {"mine": RECIPE, "more": "defaults: [mine]\nsteps: 9\n", "broken": "a: [\n"}
    folder = write_conf({f"recipe/{name}.yaml": text for name, text in recipes.items()})
    values = compose(["recipe=more"], config_dirs=[folder]).values
    assert (values["steps"], values["epochs"], values["optimizer"]["lr"]) == (9, None, 0.5)


def test_a_users_folder_comes_first_and_what_it_hides_is_named(write_conf: Write) -> None:
    folder = write_conf({"model/mlp.yaml": "_target_: mine.Net\nhidden: [7]\n", "model/own.yaml": "width: 3\n"})
    composed = compose(["recipe=null"], config_dirs=[folder])
    assert composed.values["model"] == {"_target_": "mine.Net", "hidden": [7]}
    assert composed.notes == (f"{folder}/model/mlp.yaml shadows the shipped model/mlp.yaml",)
    assert compose(["recipe=null", "model=own"], config_dirs=[folder]).values["model"] == {"width": 3}


def test_the_run_is_named_after_its_recipe(with_recipe: Callable[..., Composition]) -> None:
    assert with_recipe().values["name"] == "mine"
    assert compose(["recipe=null"]).values["name"] == "run"
    assert with_recipe("name=x").values["name"] == "x"


def test_home_is_expanded_in_paths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = compose(["recipe=null", 'init_from="~/x"', 'name="~x"', '+data.path="~/y"']).values
    assert (values["init_from"], values["data"]["path"], values["name"]) == ("/home/me/x", "/home/me/y", "~x")


def test_arguments_apply_in_order_and_mappings_are_merged() -> None:
    values = compose(["recipe=null", "batch={micro_size:4}", "batch.micro_size=8", "+seed=1", "seed=2"]).values
    assert values["batch"] == {"global_size": 64, "micro_size": 8, "accumulation": None, "drop_last": False}
    assert values["seed"] == 2
    composed = compose(["recipe=null", "callbacks=[]", "logger=null"])
    assert (composed.values["callbacks"], composed.values["logger"], composed.problems) == ({}, {}, ())


def test_callbacks_stand_under_their_names() -> None:
    composed = compose(["recipe=null", "callbacks=[plots,early_stop]", "callbacks.early_stop.patience=2"])
    assert list(composed.values["callbacks"]) == ["plots", "early_stop"]
    assert composed.values["callbacks"]["early_stop"]["patience"] == 2
    assert composed.choices["callbacks"] == ["plots", "early_stop"]


def test_a_run_folder_given_on_the_command_line_differs_from_the_default() -> None:
    given = compose(["recipe=null", "hydra.run.dir=out/${name}"])
    assert (str(given.run_dir), given.run_dir_given) == ("out/run", True)
    default = compose(["recipe=null"])
    assert str(default.run_dir).startswith("outputs/run/20")
    assert not default.run_dir_given


def test_problems_make_no_config() -> None:
    with pytest.raises(ConfigError, match="seed=1,2: is a list of choices"):
        _ = compose(["recipe=null", "seed=1,2"]).cfg


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        ("epochs: 5\n", ["steps=3"], (None, 3)),
        ("steps: 5\n", ["epochs=3"], (3, None)),
        ("steps: 5\n", [], (None, 5)),
        ("steps: 5\n", ["epochs=null"], (None, 5)),
    ],
)
def test_the_length_given_at_the_higher_place_counts(
    write_conf: Write, recipe: str, arguments: list[str], expected: tuple[int | None, int | None]
) -> None:
    folder = write_conf({"recipe/mine.yaml": recipe})
    composed = compose(["recipe=mine", *arguments], config_dirs=[folder])
    assert (composed.values["epochs"], composed.values["steps"]) == expected
    assert composed.problems == ()


def test_a_displaced_value_is_mentioned_unless_it_was_a_default(write_conf: Write, tmp_path: Path) -> None:
    folder = write_conf({"recipe/mine.yaml": "steps: 5\n"})
    composed = compose(["recipe=mine", "epochs=3"], config_dirs=[folder])
    assert composed.notes == (f"epochs=3 (command line) replaces steps=5 ({tmp_path}/conf/recipe/mine.yaml:1)",)
    assert compose(["recipe=null", "steps=3"]).notes == ()


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        ("global_size: 96\n  micro_size: 16", ["batch.accumulation=4"], (96, None, 4)),
        ("global_size: 96\n  accumulation: 2", ["batch.micro_size=8"], (96, 8, None)),
        ("micro_size: 16\n  accumulation: 2", [], (None, 16, 2)),
        ("micro_size: 16\n  accumulation: 2", ["batch.global_size=128"], (128, 16, None)),
        ("global_size: 96", ["batch.micro_size=8", "batch.accumulation=2"], (None, 8, 2)),
        ("micro_size: 16", ["batch.accumulation=4"], (64, None, 4)),
        ("global_size: 96\n  micro_size: 16", ["batch.global_size=32"], (32, 16, None)),
    ],
)
def test_of_the_batch_triple_global_size_is_displaced_last(
    write_conf: Write, recipe: str, arguments: list[str], expected: tuple[int | None, int | None, int | None]
) -> None:
    folder = write_conf({"recipe/mine.yaml": f"batch:\n  {recipe}\n"})
    composed = compose(["recipe=mine", *arguments], config_dirs=[folder])
    batch = composed.values["batch"]
    assert (batch["global_size"], batch["micro_size"], batch["accumulation"]) == expected
    assert composed.problems == ()
