"""Keys of recipes and of replaced classes that the user's keys make impossible: left out with a note, never refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError

SMALL = ("data=synthetic", "data.shape=[1,28,28]", "data.num_samples=64")


@pytest.mark.slow
def test_a_recipes_key_that_the_users_makes_impossible_is_left_out(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (*SMALL, "batch.global_size=32", "steps=2", "stop_at_step=1", "callbacks=[]", "logger=[]")
    assert main(["recipe=fashion_mnist", *own]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "micro_size=64" in line]
    assert note.startswith(
        "  note: batch.micro_size=64: is left out of the recipe: larger than batch.global_size=32. Use 32 or less. ("
    )
    (run,) = cwd.glob("outputs/fashion_mnist/*")
    assert "micro_size: 32\n" in (run / "resolved.yaml").read_text()


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
        checked(compose(["recipe=fashion_mnist", *SMALL, "batch.global_size=32", "batch.micro_size=64"]))


def test_a_mistake_of_the_recipe_itself_is_refused(write_conf: Callable[[Mapping[str, str]], Path]) -> None:
    recipe = "batch: {global_size: 32, micro_size: 64}\neval: {metric: val/accuracy}\n"
    folder = write_conf({"recipe/mine.yaml": recipe})
    with pytest.raises(ConfigError) as caught:
        checked(compose(["recipe=mine", "objective=regression"], config_dirs=[folder]))
    assert [problem.key for problem in caught.value.problems] == ["batch.micro_size"]


@pytest.mark.long
def test_a_point_of_a_sweep_leaves_out_what_is_impossible_in_it_alone(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (*SMALL, "epochs=null", "steps=1", "callbacks=[]", "logger=[]", "quiet=true", "sweep.name=sizes")
    assert main(["-m", "recipe=fashion_mnist", *own, "batch.global_size=32,128"]) == 0, capsys.readouterr()
    micro = [(cwd / f"outputs/sweeps/sizes/{job}/resolved.yaml").read_text().count("micro_size: 64") for job in "01"]
    assert micro == [0, 1]


def test_a_replaced_class_does_without_the_keys_of_the_class_before(cwd: Path) -> None:
    own = ("steps=2", "optimizer._target_=torch.optim.RMSprop", "optimizer.momentum=0.5", "callbacks=[]", "logger=[]")
    assert main([*own, "hydra.run.dir=run"]) == 0
    (note,) = [note for note in checked(compose(own)).notes if "RMSprop" in note]
    assert note == (
        "optimizer._target_=torch.optim.RMSprop does not take optimizer.betas, optimizer.amsgrad, optimizer.fused: "
        "left out. It keeps optimizer.lr, optimizer.eps, optimizer.weight_decay, optimizer.maximize, "
        "optimizer.foreach, optimizer.capturable, optimizer.differentiable, optimizer.groups"
    )
    # in a second round, the setting of a group that the class does not have
    rprop = checked(compose(["optimizer._target_=torch.optim.Rprop"]))
    assert rprop.values["optimizer"]["groups"] == {"no_decay": {"match": ["*.bias", "type:*Norm*"]}}


def test_a_key_of_the_user_that_the_replaced_class_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        checked(compose(["optimizer._target_=torch.optim.SGD", "optimizer.betas=[0.9,0.9]"]))
    assert [problem.key for problem in caught.value.problems] == ["optimizer.betas"]
