"""A value of a lower place that silently wins over one of a higher place is caught here alone.

A variable whose text stays text where its key takes a number is caught here alone.
A recipe or a choice that wins over `experiment=NAME`, a file of the user's, is caught here alone.
A recipe's key that blocks a key of the user, or gives way to another value than the next lower one, is caught.
A resumed run that ends at its old stop, or silently trains with another seed, is caught here alone.
A sweep that starts before its last point was checked, or drops a key of some points, is caught here alone.
A fold that is trained twice or not at all, and points of a sweep on unlike folds, are caught here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import trainkit
from tests.config.conftest import Write
from tests.support.refusing import Refuse, refused
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import Composer, compose
from trainkit.config.compose.jobs import ComposedConfigLoader
from trainkit.config.composition import Composition
from trainkit.config.identity import difference, other_training
from trainkit.config.resume import compose_resumed
from trainkit.config.schema import load_resolved
from trainkit.errors import ConfigError
from trainkit.verbs.running.train import expand_folds, refuse_open_folds
from trainkit.verbs.support.call import Call, parse

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
  progress: {every_s: 1.0}
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
    assert compose(["recipe=null"]).origin("epochs").where.endswith("conf/config.yaml:22")
    assert composed.origin("seed").where == "default"
    assert composed.origin("model.out_features").where.endswith("conf/model/mlp.yaml:5")
    assert composed.origin("model.dropout").where == "default of trainkit.models.Mlp"


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
    composed = with_recipe("optimizer=sgd", "callbacks=[progress]")
    assert (composed.values["optimizer"]["lr"], composed.values["callbacks"]["progress"]["every_s"]) == (0.5, 1.0)
    assert composed.notes == ()
    assert "progress" not in with_recipe("callbacks=[plots]").values["callbacks"]


def test_a_users_folder_comes_first_and_what_it_hides_is_named(write_conf: Write) -> None:
    folder = write_conf({"model/mlp.yaml": "_target_: mine.Net\nhidden: [7]\n", "model/own.yaml": "width: 3\n"})
    composed = compose(["recipe=null"], config_dirs=[folder])
    assert composed.values["model"] == {"_target_": "mine.Net", "hidden": [7]}
    assert composed.notes == (f"{folder}/model/mlp.yaml shadows the shipped model/mlp.yaml",)
    assert compose(["recipe=null", "model=own"], config_dirs=[folder]).values["model"] == {"width": 3}


def test_home_is_expanded_in_paths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = compose(["recipe=null", 'init_from="~/x"', 'name="~x"', '+data.path="~/y"']).values
    assert (values["init_from"], values["data"]["path"], values["name"]) == ("/home/me/x", "/home/me/y", "~x")


def test_a_run_folder_given_on_the_command_line_differs_from_the_default() -> None:
    composition = compose(["recipe=null", "hydra.run.dir=out/${name}"])
    assert (str(composition.run_dir), composition.run_dir_given) == ("out/run", True)
    default = compose(["recipe=null"])
    assert str(default.run_dir).startswith("outputs/run/20")
    assert not default.run_dir_given


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        ("epochs: 5\n", ["steps=3"], (None, 3)),
        ("steps: 5\n", ["epochs=3"], (3, None)),
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


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        ("global_size: 96\n  micro_size: 16", ["batch.accumulation=4"], (96, None, 4)),
        ("micro_size: 16\n  accumulation: 2", [], (None, 16, 2)),
        ("global_size: 96", ["batch.micro_size=8", "batch.accumulation=2"], (None, 8, 2)),
        ("micro_size: 16", ["batch.accumulation=4"], (64, None, 4)),
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


def test_the_text_of_a_variable_is_read_as_what_its_key_takes(
    monkeypatch: pytest.MonkeyPatch, write_conf: Write
) -> None:
    environ = {"EPOCHS": "3", "RATE": "1e-3", "WIDTHS": "[8, 16]", "ONE": "5", "NORM": "true", "NAME": "0123"}
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    folder = write_conf({"recipe/mine.yaml": "epochs: ${oc.env:EPOCHS}\nbatch: {global_size: '${oc.env:ABSENT,32}'}\n"})
    overrides = ("optimizer.lr=${oc.env:RATE}", "model.hidden=${oc.env:WIDTHS}", "model.batch_norm=${oc.env:NORM}")
    values = checked(compose(["recipe=mine", *overrides, "name=${oc.env:NAME}"], config_dirs=[folder])).values
    assert (values["epochs"], values["batch"]["global_size"], values["optimizer"]["lr"]) == (3, 32, 0.001)
    assert (values["model"]["hidden"], values["model"]["batch_norm"]) == ([8, 16], True)
    assert values["name"] == "0123", "a key that takes text keeps it"
    assert checked(compose(["model.hidden=[${oc.env:ONE},3]"])).values["model"]["hidden"] == [5, 3]


def test_a_text_that_is_no_number_is_refused_with_the_variable(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD", "many")
    (problem,) = refuse("recipe=null", "model.dropout=${oc.env:BAD}")
    assert problem.startswith("model.dropout=many: must be a number. It is the value of the environment variable BAD.")


SMALL = """\
# @package _global_

# to execute this experiment run:
# trainkit --config-dir conf experiment=small
defaults:
  - override /model: mine
  - override /optimizer: sgd
  - override /callbacks: [progress]

seed: 12345
steps: 6
model: {hidden: [5]}
optimizer: {lr: 0.02}
"""
MINE = "_target_: trainkit.models.Mlp\nin_features: 64\nhidden: [4]\nout_features: 10\n"
OVER_DIGITS = "defaults:\n  - override /recipe: digits\nsteps: 3\nname: short\n"


@pytest.fixture
def composed(write_conf: Write) -> Callable[..., Composition]:
    """Compose and check with the experiments `small` and `vision/short`."""
    files = {"experiment/small": SMALL, "model/mine": MINE, "experiment/vision/short": OVER_DIGITS}
    folder = write_conf({f"{name}.yaml": text for name, text in files.items()})

    def run(*arguments: str) -> Composition:
        return checked(compose(arguments, config_dirs=[folder]))

    return run


def test_an_experiment_is_composed_over_the_defaults(composed: Callable[..., Composition]) -> None:
    composition = composed("experiment=small")
    values = composition.values
    assert (values["seed"], values["steps"], values["epochs"], values["name"]) == (12345, 6, None, "small")
    assert (values["model"]["hidden"], values["optimizer"]["lr"]) == ([5], 0.02)
    assert (values["recipe"], values["eval"]["metric"], list(values["callbacks"])) == (None, None, ["progress"])
    assert composition.notes == ()


def test_the_command_line_wins_over_an_experiment_and_its_choices(composed: Callable[..., Composition]) -> None:
    composition = composed("experiment=small", "seed=1", "optimizer=adam")
    assert (composition.values["seed"], composition.values["optimizer"]["lr"]) == (1, 0.001)
    (note,) = composition.notes
    assert note.startswith("optimizer=adam replaces sgd: the keys that the experiment set in optimizer are dropped")


def test_an_experiment_wins_over_a_recipe_that_it_names(composed: Callable[..., Composition]) -> None:
    values = composed("experiment=vision/short").values
    assert (values["steps"], values["epochs"], values["recipe"], values["name"]) == (3, None, "digits", "short")
    assert (values["optimizer"]["lr"], values["eval"]["metric"]) == (0.01, "val/accuracy")
    # a recipe of the command line lies below the experiment too
    composition = composed("experiment=small", "recipe=digits")
    assert (composition.values["optimizer"]["lr"], composition.values["warmup"]["epochs"]) == (0.02, 1)
    assert "the experiment replaces mlp: the keys that the recipe set in model are dropped with it" in " ".join(
        composition.notes
    )


SYNTHETIC = ("data=synthetic", "data.shape=[1,28,28]", "data.num_samples=64")


def test_a_recipes_key_that_the_users_makes_impossible_is_left_out_with_a_note() -> None:
    composed = checked(compose(["recipe=fashion_mnist", *SYNTHETIC, "batch.global_size=32"]))
    (note,) = [note for note in composed.notes if "micro_size=64" in note]
    assert note.startswith("batch.micro_size=64: is left out of the recipe: larger than batch.global_size=32.")
    assert composed.values["batch"]["micro_size"] is None


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("objective=regression",), ("eval", "metric"), None),
        (("recipe=resnet50_imagenet", "data.path=.", "optimizer.momentum=0"), ("optimizer", "nesterov"), False),
    ],
)
def test_the_value_of_the_choice_or_of_the_defaults_takes_its_place(
    arguments: tuple[str, ...], key: tuple[str, str], value: object
) -> None:
    composed = checked(compose(arguments))
    assert composed.values[key[0]][key[1]] == value
    assert sum("is left out of the recipe" in note for note in composed.notes) == 1


def test_a_key_that_the_user_set_is_never_left_out() -> None:
    with pytest.raises(ConfigError, match=r"batch.micro_size=64: larger than batch.global_size=32"):
        checked(compose(["recipe=fashion_mnist", *SYNTHETIC, "batch.global_size=32", "batch.micro_size=64"]))


@pytest.mark.slow
def test_a_replaced_class_does_without_the_keys_of_the_class_before(cwd: Path) -> None:
    keys = ("steps=2", "optimizer._target_=torch.optim.RMSprop", "optimizer.momentum=0.5", "callbacks=[]", "logger=[]")
    assert main([*keys, "hydra.run.dir=run"]) == 0
    notes = [note for note in checked(compose(keys)).notes if "RMSprop" in note]
    assert [note.partition("=")[0] for note in notes] == ["optimizer.betas", "optimizer.amsgrad", "optimizer.fused"]
    assert "is left out with optimizer._target_=torch.optim.RMSprop: no such key in RMSprop." in notes[0]
    # in a second round, the setting of a group that the class does not have
    rprop = checked(compose(["optimizer._target_=torch.optim.Rprop"]))
    assert rprop.values["optimizer"]["groups"] == {"no_decay": {"match": ["*.bias", "type:*Norm*"]}}


def test_a_key_that_the_replaced_class_does_not_take_is_refused(write_conf: Write) -> None:
    folder = write_conf({"recipe/own.yaml": "optimizer: {_target_: torch.optim.SGD, lr: 0.1, momentun: 0.9}\n"})
    for arguments, key in (
        (["optimizer._target_=torch.optim.SGD", "optimizer.betas=[0.9,0.9]"], "optimizer.betas"),
        (["recipe=own"], "optimizer.momentun"),
    ):
        with pytest.raises(ConfigError) as caught:
            checked(compose(arguments, config_dirs=[folder]))
        assert [problem.key for problem in caught.value.problems] == [key]


NODES = {
    "model": "{_target_: trainkit.models.Gpt, vocab_size: 9, context: 8, num_layers: 1, num_heads: 1, width: 4}",
    "optimizer": "{_target_: torch.optim.SGD, lr: 0.1}",
    "data": "{_target_: trainkit.data.SyntheticTokens, vocab_size: 9, context: 8}",
    "objective": "{_target_: trainkit.objectives.LanguageModelling}",
    "schedule": "{_target_: trainkit.schedules.Constant}",
    "strategy": "{_target_: trainkit.strategies.Mirrored, replicas: 2}",
}


@pytest.mark.parametrize("kind", ["recipe", "experiment"])
def test_a_class_in_a_file_means_the_same_as_on_the_command_line(kind: str, write_conf: Write) -> None:
    folder = write_conf({f"{kind}/own.yaml": "".join(f"{group}: {node}\n" for group, node in NODES.items())})
    file = checked(compose([f"{kind}=own"], config_dirs=[folder]))
    typed = checked(compose(["recipe=null", *(f"{group}={node}" for group, node in NODES.items())]))
    assert {group: file.values[group] for group in NODES} == {group: typed.values[group] for group in NODES}
    assert [note for note in file.notes if "left out" in note] == [note for note in typed.notes if "left out" in note]


def test_a_choice_of_the_user_replaces_the_class_of_a_recipe(write_conf: Write) -> None:
    folder = write_conf({"recipe/own.yaml": f"optimizer: {NODES['optimizer']}\n"})
    composition = checked(compose(["recipe=own", "optimizer=adamw"], config_dirs=[folder]))
    assert composition.values["optimizer"]["_target_"] == "torch.optim.AdamW"
    assert composition.notes[0].startswith("optimizer=adamw replaces torch.optim.SGD: the keys that the recipe set")


def test_a_callback_of_the_recipe_alone_is_left_out_where_other_data_lacks_what_it_needs() -> None:
    composition = checked(compose(["recipe=shakespeare", "data=synthetic_tokens"]))
    assert [*composition.values["callbacks"]] == ["progress", "plots"]
    rule = "needs encode and decode of the data, and SyntheticTokens has no encode, decode."
    assert any(note.startswith(f"callbacks.sample: is left out of the recipe: {rule}") for note in composition.notes)
    chosen = checked(compose(["recipe=shakespeare", "data=synthetic_tokens", "callbacks=[sample]"]))
    assert [*chosen.values["callbacks"]] == ["sample"], "the user chose it: it is refused at the start of the run"
    assert "sample" in checked(compose(["recipe=shakespeare"])).values["callbacks"]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run folder with the config that a run resolved."""
    arguments = ["recipe=null", "optimizer=sgd", "optimizer.lr=0.3", "batch.micro_size=16", "stop_at_step=5"]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(compose(arguments).values))
    return tmp_path


def test_the_config_is_that_of_the_run(earlier: Path) -> None:
    composed = compose_resumed(earlier, [])
    assert composed.values["optimizer"]["lr"] == 0.3
    assert composed.values["batch"]["micro_size"] == 16
    assert (composed.values["resume"], composed.run_dir, composed.run_dir_given) == ("auto", earlier, True)
    assert composed.origin("optimizer").where.startswith(f"{earlier}/resolved.yaml:")


def test_another_training_is_refused_by_name(earlier: Path) -> None:
    composed = compose_resumed(earlier, ["optimizer.lr=0.1", "seed=1"])
    problems = other_training(difference(load_resolved(earlier / "resolved.yaml"), composed.cfg), run=earlier)
    lines = [str(problem) for problem in composed.with_origins(ConfigError(problems)).problems]
    assert lines[0] == f"seed=1: the run to resume, {earlier}, has 0. Give it the same value. (command line)"
    assert lines[1].startswith(f"optimizer.lr=0.1: the run to resume, {earlier}, has 0.3.")


def points(*arguments: str) -> list[Composition]:
    call, _ = parse(["-m", "recipe=null", *arguments])
    return call.compose_points()


def test_a_key_of_a_group_applies_to_the_choices_that_have_it() -> None:
    one_device, mirrored = points("strategy=one_device,mirrored", "strategy.replicas=2", "strategy.device=cpu")
    assert (one_device.values["strategy"]["device"], "device" in mirrored.values["strategy"]) == ("cpu", False)
    assert "replicas" not in one_device.values["strategy"]
    assert one_device.notes[-1] == "strategy.replicas: left out, one_device has no such key"
    assert mirrored.values["strategy"]["replicas"] == 2


@pytest.mark.parametrize("prefix", ["", "+"])
def test_a_key_that_only_the_class_of_the_user_takes_is_swept(prefix: str) -> None:
    """`width` is a key of the shipped gpt, which no class of these points is."""
    target = "model._target_=tests.config.test_compose.Net"
    call, _ = parse(["--allow-package", "tests", "-m", "recipe=null", target, f"{prefix}model.width=8,16"])
    assert [point.values["model"]["width"] for point in call.compose_points()] == [8, 16]


class Net(torch.nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(64, width)


def test_a_key_that_no_point_has_is_a_problem() -> None:
    assert refused(points, "optimizer=adamw,adam", "optimizer.momentum=0.9") == [
        "optimizer.momentum: no such key in adamw. It belongs to sgd: add optimizer=sgd. (command line)"
    ]


def test_problems_of_plans_are_reported_for_all_points_before_the_first_run(refuse: Refuse) -> None:
    problems = refuse("-m", "recipe=null", "steps=20", "warmup.steps=5,30,40", "batch.micro_size=64,32")
    rule = "steps of warmup, and the training has 20. Use 20 or fewer. (command line)"
    assert problems == [f"warmup.steps=30: 30 {rule}", f"warmup.steps=40: 40 {rule}"]


def test_the_command_of_a_point_holds_what_it_needs_and_nothing_of_the_sweep(tmp_path: Path) -> None:
    loader = ComposedConfigLoader(Composer([tmp_path], ["tests"]))
    line = ["recipe=null", "strategy=one_device", "strategy.replicas=2", "sweep.name=x", "hydra.sweep.dir=y"]
    command = loader.command(line, tmp_path / "job 1")
    assert command[1:] == (
        "-m", "trainkit", "--no-project", "--config-dir", str(tmp_path), "--allow-package", "tests",
        "recipe=null", "strategy=one_device", f'hydra.run.dir="{tmp_path}/job 1"',
    )  # fmt: skip


def overrides(*extra: str) -> tuple[str, ...]:
    return expand_folds(Call(overrides=("recipe=null", *extra))).overrides[1:]


def test_folds_become_a_key_that_is_swept() -> None:
    assert overrides("cv.folds=5") == ("cv.folds=5", "cv.fold=range(5)")
    assert overrides("cv.folds=2", "optimizer.lr=0.1,0.2") == ("cv.folds=2", "optimizer.lr=0.1,0.2", "cv.fold=range(2)")


def test_sweeps_whose_points_would_have_other_folds_are_refused(tmp_path: Path) -> None:
    assert refused(overrides, "cv.folds=3,5")[0].startswith("cv.folds: must be one number")
    assert refused(overrides, "cv.folds=3", "hydra/sweeper=optuna")[0].startswith("hydra/sweeper: optuna learns from")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "folds.yaml").write_text("# @package _global_\ncv: {folds: 3}\n")
    point = trainkit.compose(["recipe=folds"], config_dirs=[tmp_path])
    assert refused(refuse_open_folds, [point])[0].startswith("cv.folds=3: only some points of the sweep use it.")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cv.folds=1"], ["cv.folds=1: must be at least 2."]),
        (["cv.folds=3", "cv.fold=3"], ["cv.fold=3: there are cv.folds=3, counted from 0. Use 2 or less."]),
        (
            ["cv.fold=3", "cv.seed=1"],
            ["cv.fold=3: has no effect without cv.folds.", "cv.seed=1: has no effect without cv.folds."],
        ),
    ],
)
def test_bad_folds_are_problems_before_anything_runs(arguments: list[str], expected: list[str]) -> None:
    assert [line.removesuffix(" (command line)") for line in refused(trainkit.compose, arguments)] == expected
