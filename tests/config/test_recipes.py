"""The recipes that ship compose cleanly, alone and with another placement."""

import re
import shlex
from dataclasses import replace

import pytest

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.yaml_files import read_document, shipped_recipes

NAMES = sorted(file.parent.name for file in shipped_recipes().glob("*/recipe.yaml"))

NEEDED = {"resnet50_imagenet": ("data.path=/somewhere",)}
"""What a recipe cannot know."""


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_composes_without_a_problem_and_without_an_idle_key(name: str) -> None:
    composed = checked(replace(compose([f"recipe={name}", *NEEDED.get(name, ())]), reads_files=False))
    assert composed.notes == ()
    assert (composed.values["recipe"], composed.values["name"]) == (name, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_another_strategy(name: str) -> None:
    checked(
        replace(
            compose([f"recipe={name}", *NEEDED.get(name, ()), "strategy=mirrored", "strategy.replicas=2"]),
            reads_files=False,
        )
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_how_it_is_run(name: str) -> None:
    file = shipped_recipes() / name / "recipe.yaml"
    assert read_document(file).description
    assert f"recipe={name}" in file.read_text()


def test_the_default_is_the_recipe_digits() -> None:
    assert compose([]).values["recipe"] == "digits"
    assert "shakespeare" in NAMES


def commands_of(page: str) -> list[list[str]]:
    """The arguments of each command line of a page, which may begin a loop over seeds."""
    lines = re.findall(r"^    .*?python -m trainkit (\S.*)$", page.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line.partition(";")[0].replace("$seed", "0")) for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_its_page_is_a_whole_config(name: str) -> None:
    commands = commands_of((shipped_recipes() / name / "README.md").read_text())
    assert commands
    for arguments in commands:
        assert f"recipe={name}" in arguments
        checked(replace(compose(arguments), reads_files=False))
