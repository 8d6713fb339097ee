"""A recipe's key that blocks a key of the user, or gives way to another value than the next lower one, is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.conftest import Write
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError

SMALL = ("data=synthetic", "data.shape=[1,28,28]", "data.num_samples=64")


def test_a_recipes_key_that_the_users_makes_impossible_is_left_out_with_a_note() -> None:
    composed = checked(compose(["recipe=fashion_mnist", *SMALL, "batch.global_size=32"]))
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


def test_of_several_files_below_the_recipe_the_highest_gives_the_value(write_conf: Write) -> None:
    folder = write_conf(
        {
            "recipe/mine.yaml": "batch: {micro_size: 64}\n",
            "debug/small.yaml": "# @package _global_\nbatch: {micro_size: 4}\n",
        }
    )
    composed = checked(compose(["recipe=mine", "+debug=small", "batch.global_size=32"], config_dirs=[folder]))
    assert composed.values["batch"]["micro_size"] == 4


def test_a_key_that_the_user_set_is_never_left_out() -> None:
    with pytest.raises(ConfigError, match=r"batch.micro_size=64: larger than batch.global_size=32"):
        checked(compose(["recipe=fashion_mnist", *SMALL, "batch.global_size=32", "batch.micro_size=64"]))


def test_a_mistake_of_the_recipe_itself_is_refused(write_conf: Write) -> None:
    recipe = "batch: {global_size: 32, micro_size: 64}\neval: {metric: val/accuracy}\n"
    folder = write_conf({"recipe/mine.yaml": recipe})
    with pytest.raises(ConfigError) as caught:
        checked(compose(["recipe=mine", "objective=regression"], config_dirs=[folder]))
    assert [problem.key for problem in caught.value.problems] == ["batch.micro_size"]


def test_a_replaced_class_does_without_the_keys_of_the_class_before(cwd: Path) -> None:
    own = ("steps=2", "optimizer._target_=torch.optim.RMSprop", "optimizer.momentum=0.5", "callbacks=[]", "logger=[]")
    assert main([*own, "hydra.run.dir=run"]) == 0
    (note,) = [note for note in checked(compose(own)).notes if "RMSprop" in note]
    assert (
        "does not take optimizer.betas, optimizer.amsgrad, optimizer.fused: left out. It keeps optimizer.lr, " in note
    )
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


@pytest.mark.parametrize("place", ["recipe", "experiment"])
def test_a_class_in_a_file_means_the_same_as_on_the_command_line(place: str, write_conf: Write) -> None:
    text = "".join(f"{group}: {node}\n" for group, node in NODES.items())
    folder = write_conf({f"{place}/own.yaml": text})
    found = checked(compose([f"{place}=own"], config_dirs=[folder]))
    typed = checked(compose(["recipe=null", *(f"{group}={node}" for group, node in NODES.items())]))
    assert {group: found.values[group] for group in NODES} == {group: typed.values[group] for group in NODES}
    assert [note for note in found.notes if "left out" in note] == [note for note in typed.notes if "left out" in note]


def test_a_choice_of_the_user_replaces_the_class_of_a_recipe(write_conf: Write) -> None:
    folder = write_conf({"recipe/own.yaml": f"optimizer: {NODES['optimizer']}\n"})
    found = checked(compose(["recipe=own", "optimizer=adamw"], config_dirs=[folder]))
    assert found.values["optimizer"]["_target_"] == "torch.optim.AdamW"
    assert found.notes[0].startswith("optimizer=adamw replaces torch.optim.SGD: the keys that the recipe set")


def test_a_callback_of_the_recipe_alone_is_left_out_where_other_data_lacks_what_it_needs() -> None:
    found = checked(compose(["recipe=shakespeare", "data=synthetic_tokens"]))
    assert [*found.values["callbacks"]] == ["progress", "plots"]
    rule = "needs encode and decode of the data, and SyntheticTokens has no encode, decode."
    assert any(note.startswith(f"callbacks.sample: is left out of the recipe: {rule}") for note in found.notes)
    asked = checked(compose(["recipe=shakespeare", "data=synthetic_tokens", "callbacks=[sample]"]))
    assert [*asked.values["callbacks"]] == ["sample"], "the user chose it: it is refused at the start of the run"
    assert "sample" in checked(compose(["recipe=shakespeare"])).values["callbacks"]
