"""A shipped YAML or recipe that lacks a key of its class, or holds another default than it, is caught here alone."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.composition import leaves, lookup
from trainkit.config.schema import GROUPS, RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import GROUP_KEYS, INJECTED, resolve_target, signature_of
from trainkit.config.yaml_files import read_document, shipped_conf, shipped_recipes

CHOICES = sorted(shipped_conf().glob("*/*.yaml"))
RECIPES = sorted(file.parent.name for file in shipped_recipes().glob("*/recipe.yaml"))
NEEDED = {"resnet50_imagenet": ("data.path=/somewhere",)}
"""What a recipe cannot know."""


def unlike_its_class(group: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a choice lacks, and those that its class does not take."""
    signature = signature_of(resolve_target(values[TARGET]))
    keys = {*signature.keys} - {*INJECTED.get(group, ())}
    listed = {*values} - {TARGET, *GROUP_KEYS.get(group, ())}
    yield from listed - keys if signature.takes_more else listed ^ keys


def test_every_copy_of_a_default_is_that_of_its_class() -> None:
    for file in CHOICES:
        document, group = read_document(file), file.parent.name
        assert (group in GROUPS, document.gotchas) == (True, ()), file
        assert document.description, file
        assert TARGET not in document.values or [*unlike_its_class(group, document.values)] == [], file
    shipped = compose(["recipe=null"]).values
    for path, default in leaves(RunConfig().to_dict()):
        assert path[0] in GROUPS or path == ("epochs",) or lookup(shipped, path) == default, path


def test_every_choice_of_these_groups_composes_cleanly() -> None:
    for file in CHOICES:
        if file.parent.name in ("optimizer", "schedule", "strategy"):
            checked(compose(["recipe=null", f"{file.parent.name}={file.stem}"]))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_without_an_idle_key_alone_and_on_two_replicas(name: str) -> None:
    arguments = [f"recipe={name}", *NEEDED.get(name, ())]
    composed = checked(replace(compose(arguments), reads_files=False))
    assert composed.notes == ()
    assert (composed.values["recipe"], composed.values["name"]) == (name, name)
    checked(replace(compose([*arguments, "strategy=mirrored", "strategy.replicas=2"]), reads_files=False))
    assert read_document(shipped_recipes() / name / "recipe.yaml").description


@pytest.mark.parametrize("name", RECIPES)
def test_each_command_of_its_page_is_a_whole_config(name: str) -> None:
    page = (shipped_recipes() / name / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^    .*?python -m trainkit (\S.*)$", page, re.MULTILINE)
    assert lines
    for line in lines:  # which may begin a loop over seeds
        arguments = shlex.split(line.partition(";")[0].replace("$seed", "0"))
        assert f"recipe={name}" in arguments
        checked(replace(compose(arguments), reads_files=False))
