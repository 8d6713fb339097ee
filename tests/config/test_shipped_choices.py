"""A shipped YAML that repeats a default of its class, or a default that is misread, is caught here alone.

The public names of trainkit's classes: what a config may name, wherever the code is.
A recipe that no longer composes, or whose numbers depend on how a step is cut, is caught here alone.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainkit
from trainkit import names
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.composition import lookup
from trainkit.config.described.key_facts import default_of
from trainkit.config.schema import GROUPS, RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import GROUP_KEYS, INJECTED, resolve_target, signature_of
from trainkit.config.targets.choices import read_choice
from trainkit.config.values import leaves
from trainkit.config.yaml_files import read_document, shipped_conf, shipped_recipes
from trainkit.errors import ConfigError

CHOICES = sorted(shipped_conf().glob("*/*.yaml"))
RECIPES = sorted(file.parent.name for file in shipped_recipes().glob("*/recipe.yaml"))
NEEDED = {"resnet50_imagenet": ("data.path=/somewhere",)}
"""What a recipe cannot know."""


def test_a_choice_has_every_key_of_its_class_and_repeats_no_default() -> None:
    for file in CHOICES:
        choice, written, group = read_choice(file), read_document(file).values, file.parent.name
        assert group in GROUPS, file
        assert choice.description, file
        kind = resolve_target(written[TARGET]) if TARGET in written else dict
        usual = {key: default_of(kind, key) for key in signature_of(kind).keys if key not in INJECTED.get(group, ())}
        assert {*choice.values} - {TARGET, *GROUP_KEYS.get(group, ())} == usual.keys(), file
        assert [key for key in choice.of_class if repr(choice.values[key]) != repr(usual[key])] == [], file
        repeated = written.keys() & usual.keys() - written.get("source", {}).keys()  # a figure stands beside its source
        of_torch = str(written.get(TARGET)).startswith("torch.")
        assert of_torch or [key for key in repeated if written[key] == usual[key]] == [], file
    for path, value in leaves(read_document(shipped_conf() / "config.yaml").values):
        assert path[0] == "hydra" or lookup(RunConfig().to_dict(), path) != value, path


@pytest.mark.slow
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
    model = composed.values["model"]
    couples = model["_target_"].endswith(("ConvNet", "ResNet")) or model.get("dropout", 0) > 0
    assert composed.values["batch"]["micro_size"] is not None or not couples
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


ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(rf"\btrainkit\.(?:{'|'.join({name.split('.')[1] for name in names.NAMES})})\.[A-Z]\w+")
EXAMPLE = "trainkit.strategies.MyStrategy"  # docs/adding-a-strategy.md


@pytest.mark.parametrize("public", names.NAMES)
def test_a_name_is_that_of_its_class(public: str) -> None:
    package, _, kind = public.rpartition(".")
    cls = getattr(import_module(package), kind)
    assert (cls.__module__, cls.__qualname__) == (names.NAMES[public], kind)
    assert names.name_of(cls) == public


def test_the_names_are_those_of_the_shipped_files() -> None:
    files = [
        file for room in ("conf", "docs", "recipes", "template", "trainkit") for file in (ROOT / room).rglob("*.*")
    ]
    texts = [file.read_text() for file in files if file.suffix in (".yaml", ".md", ".py") and file.name != "names.py"]
    assert {name for text in texts for name in NAMED.findall(text)} == {*names.NAMES, EXAMPLE}
    assert len({name.rpartition(".")[2] for name in names.NAMES}) == len(names.NAMES)


@pytest.mark.slow
def test_each_verb_refuses_a_run_of_an_earlier_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    assert main(["recipe=digits", "steps=1", "warmup.epochs=0", "quiet=true", f"hydra.run.dir={old}"]) == 0
    config = old / "resolved.yaml"
    config.write_text(config.read_text().replace("trainkit.data.Digits", "trainkit.data.sets.images.Digits"))
    capsys.readouterr()
    problem = (
        f"{config}: names trainkit.data.sets.images.Digits: a version before 0.1.0 wrote this run, with other names "
        f"and fingerprints. Read and resume it with that version, or train on from its weights, init_from={old}."
    )
    for command in ("resume", "evaluate", "predict --out=x.jsonl", "report", "generate --prompt=x", "export --to=onnx",
        *(["quantize --to=int8_weight"] if find_spec("torchao") else []), f"diff {old}", f"report {old}"):  # fmt: skip
        verb, *arguments = command.split()
        assert main([verb, str(old), *arguments]) == 2, command
        assert capsys.readouterr().err.splitlines() == ["1 problem in the config", f"  {problem}"], command
    with pytest.raises(ConfigError) as caught:
        trainkit.load(old)
    assert str(caught.value.problems[0]) == problem
    assert main(["recipe=digits", "steps=1", "quiet=true", f"init_from={old}", f"hydra.run.dir={tmp_path}/new"]) == 0
